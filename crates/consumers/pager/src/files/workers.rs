//! Answers requests that wait for donors, staging slots or local memory.
//!
//! Requests that add pages to the page cache have one queue, and all others a second one. The first
//! kind may wait for room in local memory, and eviction makes room by writing dirty pages back. So
//! such writes must not wait behind requests of the first kind.
//!
//! The queues are unbounded. The kernel limits their length: one request per thread of the
//! programs, and 64 background requests ([`super::requests`]).

use crate::files::fetch::Fetcher;
use crate::files::requests::write::is_write_back;
use crate::files::requests::{BUFFER_BYTES, Handler, Stop};
use crate::shared::Shared;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire::{Reply, Request, opcode};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

/// A request that must wait.
pub(super) struct Job {
    pub(super) request: Request,
    /// The whole message of a write; empty for other requests.
    pub(super) message: Vec<u8>,
}

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

/// The queues of the worker threads.
#[derive(Clone, Default)]
pub(super) struct Workers {
    /// Reads, and writes that the page cache does not hold.
    adding: Arc<Queue>,
    others: Arc<Queue>,
}

impl Workers {
    pub(super) fn take(&self, job: Job) {
        let waits_for_room = match job.request.opcode {
            opcode::READ => true,
            opcode::WRITE => !is_write_back(&job.request),
            _ => false,
        };
        if waits_for_room { self.adding.push(job) } else { self.others.push(job) }
    }

    /// Answers requests that add pages to the page cache, or all others, until the process ends.
    pub(super) fn work(
        &self,
        adds_pages: bool,
        shared: Arc<Shared>,
        fetcher: Fetcher,
        device: &Device,
    ) {
        let queue = if adds_pages { &self.adding } else { &self.others };
        let mut handler = Handler { shared, fetcher: Some(fetcher) };
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let Job { request, message } = queue.pop();
            buffer[..message.len()].copy_from_slice(&message);
            let reply = match handler.answer(&request, &mut buffer, message.len()) {
                Ok(reply) => reply,
                Err(Stop::Error(errno)) => Reply::Error(errno),
                Err(Stop::Wait) => Reply::Error(Errno::IO),
            };
            device.answer(request.unique, &reply, &buffer);
        }
    }
}
