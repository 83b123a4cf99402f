//! Answers requests that must wait: for donors, for a place in staging, for room in local memory.
//!
//! What changes files does not stand behind reads: those may wait for room, which is made by
//! writing what is dirty.
//!
//! As many requests may wait as the kernel sends: one for each thread of the programs, and those
//! that nobody waits for ([`super::requests`]).

use crate::files::fetch::Fetcher;
use crate::files::requests::{BUFFER_BYTES, Clerk, Stop};
use crate::shared::Shared;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire::{Reply, Request, opcode};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

/// A request that must wait.
pub(super) struct Job {
    pub(super) request: Request,
    /// Its whole message, if that says more than the request.
    pub(super) message: Vec<u8>,
}

/// Requests in their order.
#[derive(Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    came: Condvar,
}

impl Queue {
    fn push(&self, job: Job) {
        self.jobs.lock().expect("no thread panics with it").push_back(job);
        self.came.notify_one();
    }

    fn pop(&self) -> Job {
        let mut jobs = self.jobs.lock().expect("no thread panics with it");
        loop {
            match jobs.pop_front() {
                Some(job) => return job,
                None => jobs = self.came.wait(jobs).expect("no thread panics with it"),
            }
        }
    }
}

/// The two queues.
#[derive(Clone, Default)]
pub(super) struct Backroom {
    reads: Arc<Queue>,
    changes: Arc<Queue>,
}

impl Backroom {
    pub(super) fn take(&self, job: Job) {
        let is_read = job.request.opcode == opcode::READ;
        if is_read { self.reads.push(job) } else { self.changes.push(job) }
    }

    /// Runs as long as the process, for reads or for what changes files.
    pub(super) fn work(
        &self,
        is_for_reads: bool,
        shared: Arc<Shared>,
        fetcher: Fetcher,
        device: &Device,
    ) {
        let queue = if is_for_reads { &self.reads } else { &self.changes };
        let mut clerk = Clerk { shared, fetcher: Some(fetcher) };
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let Job { request, message } = queue.pop();
            buffer[..message.len()].copy_from_slice(&message);
            let reply = match clerk.answer(&request, &mut buffer, message.len()) {
                Ok(reply) => reply,
                Err(Stop::Error(errno)) => Reply::Error(errno),
                Err(Stop::Wait) => Reply::Error(Errno::IO),
            };
            device.answer(request.unique, &reply, &buffer);
        }
    }
}
