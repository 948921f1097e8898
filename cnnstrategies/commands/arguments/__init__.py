"""What is known before a command's code is imported: the commands, their words, their help."""
