"""What a run recorded -> rows, summary, the oracle beside each measurement, expectations. Pure functions."""
