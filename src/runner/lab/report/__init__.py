"""Reports: any set of runs read from their files, as a table, a difference, a comparison with a baseline, or a page."""
