"""Pipeline training in which every rank runs the module's steps once, as one device does."""
