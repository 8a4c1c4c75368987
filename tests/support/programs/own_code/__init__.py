"""Programs that train with own steps, losses and objectives."""
