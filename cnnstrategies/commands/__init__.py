"""The commands of the command line, one module each. What is imported to find and describe them is light."""
