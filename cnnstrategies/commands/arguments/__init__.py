"""The declared commands, their parsing and their help; fast to import, because every start imports them."""
