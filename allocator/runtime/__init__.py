"""The SYCL runtime: its libraries, devices and queues; formatting."""
