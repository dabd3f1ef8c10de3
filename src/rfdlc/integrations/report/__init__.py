"""The report: one HTML file that opens anywhere, and plots for papers."""
