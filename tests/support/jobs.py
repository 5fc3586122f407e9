# SPDX-License-Identifier: Apache-2.0
"""Makes the tasks of a batch by a worker in this process."""

from wanjax.jobs.maker import batch_key
from wanjax.jobs.store import NewJob
from wanjax.jobs.worker import work


def run_tasks(store, maker, tasks, **how):
    """Return the job of each task, once a worker has made all that it can."""
    jobs = [NewJob(task.output, task.request.to_json(), "nano", task.output, batch_key(task.request)) for task in tasks]
    store.add_all(jobs)
    work(store, maker, max_batch=32, until_empty=True, **how)
    return [store.get(task.output) for task in tasks]
