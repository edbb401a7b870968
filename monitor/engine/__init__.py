"""From verdicts to alerts, incidents, plans and messages: pure, and the same code live and in a backtest."""
