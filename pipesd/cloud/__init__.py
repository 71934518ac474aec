"""The cloud: the front, its workers, the target model, and the program `pipesd-cloud`."""
