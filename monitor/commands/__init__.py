"""The command line, one file a command: arguments in, a sentence and an exit code out. What a command does lives in the rooms below."""
