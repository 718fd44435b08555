"""Effects of changed facts: functions of facts, plans and estimates."""
