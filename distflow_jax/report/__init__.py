"""Output of a run: metrics files, progress, report.html, pictures of plans."""
