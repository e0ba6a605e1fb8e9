"""One file a command. Heavy imports stand inside the functions, so that --help answers at once."""
