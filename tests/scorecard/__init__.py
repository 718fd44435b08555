"""The scorecard: predictions for published runs beside what was measured."""
