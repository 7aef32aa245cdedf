"""What a run writes and shows: metrics files, progress, report.html, pictures of plans."""
