"""Pages and tables about runs, made from the files that runs leave behind. Nothing here loads PyTorch."""
