"""What another fact would change: functions of facts, plans and estimates."""
