"""The SYCL runtime: its libraries, devices and queues, and the driver's memory."""
