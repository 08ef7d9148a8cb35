"""The runner's commands, one file each; `app` puts them together."""
