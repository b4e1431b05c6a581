"""`report.html`: a run's folder as one page that opens anywhere."""

from lora_trainer.report.write import FILE, write_comparison, write_report

__all__ = ["FILE", "write_comparison", "write_report"]
