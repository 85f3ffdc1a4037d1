"""The subcommands of ``readmit``, one a file; `readmit.cli` imports the one that is called."""
