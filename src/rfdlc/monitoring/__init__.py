"""Decisions in service: windows, alarms, feedback and recalibration."""
