"""An event-sourced multimodal inference engine."""
