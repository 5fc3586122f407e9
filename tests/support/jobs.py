# SPDX-License-Identifier: Apache-2.0
"""Runs the tasks of a batch with a worker in this process."""

from wanjax.jobs.maker import batch_key
from wanjax.jobs.store import NewJob
from wanjax.jobs.worker import work


def run_tasks(store, maker, tasks, **options):
    """Run one worker until the queue is empty, and return the job of each task."""
    jobs = [NewJob(task.output, task.request.to_json(), "nano", task.output, batch_key(task.request)) for task in tasks]
    store.add_all(jobs)
    work(store, maker, max_batch=32, until_empty=True, **options)
    return [store.get(task.output) for task in tasks]
