//! Answers requests that wait for donors, staging slots or local memory.
//!
//! | queue | has | workers |
//! |---|---|---|
//! | reads | reads, which may wait for room in local memory | several |
//! | changes | writes, truncations and holes, in the kernel's order | one |
//! | late | answers to `write` calls, which are sent when there is room | one |
//!
//! The kernel sends a second write of a page before the first is answered: a `write` call, and the
//! write-back of what was stored to the mapped page since. The last one must win, so changes are
//! executed in their order. No change waits for room, since eviction makes room by write-back:
//! instead, the answer to a `write` call waits.
//!
//! The queues are unbounded. The kernel limits their length: one request per thread of the
//! programs, and 64 background requests ([`super::requests`]).

use crate::files::fetch::Fetcher;
use crate::files::requests::write::is_write_back;
use crate::files::requests::{BUFFER_BYTES, Handler, Outcome, Stop};
use crate::shared::Shared;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire::{Reply, Request, opcode};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

/// A request that must wait.
pub(super) struct Job {
    pub(super) request: Request,
    /// The whole message of a write; empty for other requests.
    pub(super) message: Vec<u8>,
}

/// The answer to a request with this number.
struct LateAnswer {
    unique: u64,
    bytes: Vec<u8>,
}

struct Queue<T> {
    waiting: Mutex<VecDeque<T>>,
    came: Condvar,
}

impl<T> Queue<T> {
    fn new() -> Queue<T> {
        Queue { waiting: Mutex::new(VecDeque::new()), came: Condvar::new() }
    }

    fn push(&self, one: T) {
        self.waiting.lock().expect("no thread panics with it").push_back(one);
        self.came.notify_one();
    }

    fn pop(&self) -> T {
        let mut waiting = self.waiting.lock().expect("no thread panics with it");
        loop {
            match waiting.pop_front() {
                Some(one) => return one,
                None => waiting = self.came.wait(waiting).expect("no thread panics with it"),
            }
        }
    }
}

/// The queues of the worker threads.
pub(super) struct Workers {
    shared: Arc<Shared>,
    device: Arc<Device>,
    reads: Queue<Job>,
    changes: Queue<Job>,
    /// Changes that were queued and are not executed yet.
    unfinished: AtomicUsize,
    late: Queue<LateAnswer>,
}

impl Workers {
    pub(super) fn new(shared: Arc<Shared>, device: Arc<Device>) -> Workers {
        let unfinished = AtomicUsize::new(0);
        let (reads, changes, late) = (Queue::new(), Queue::new(), Queue::new());
        Workers { shared, device, reads, changes, unfinished, late }
    }

    /// Queues a request. The dispatcher calls this.
    pub(super) fn take(&self, job: Job) {
        if job.request.opcode == opcode::READ {
            return self.reads.push(job);
        }
        self.unfinished.fetch_add(1, SeqCst);
        self.changes.push(job);
    }

    /// Whether a request must be queued, because it is a change and an earlier one is unfinished.
    pub(super) fn must_queue(&self, request: &Request) -> bool {
        request.changes_the_file() && self.unfinished.load(SeqCst) > 0
    }

    /// Answers reads until the process ends.
    pub(super) fn read(&self, fetcher: Fetcher) {
        self.work(&self.reads, fetcher, || {});
    }

    /// Executes changes until the process ends.
    pub(super) fn change(&self, fetcher: Fetcher) {
        self.work(&self.changes, fetcher, || {
            self.unfinished.fetch_sub(1, SeqCst);
        });
    }

    fn work(&self, queue: &Queue<Job>, fetcher: Fetcher, done: impl Fn()) {
        let mut handler = Handler { shared: Arc::clone(&self.shared), fetcher: Some(fetcher) };
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let Job { request, message } = queue.pop();
            buffer[..message.len()].copy_from_slice(&message);
            let outcome = handler.answer(&request, &mut buffer, message.len());
            done();
            self.answer(&request, outcome, &buffer);
        }
    }

    /// Sends the answer to a request, now or when there is room. After a failure it sends none:
    /// see [`Stop::Lost`].
    pub(super) fn answer(&self, request: &Request, outcome: Outcome, buffer: &[u8]) {
        let reply = match outcome {
            Ok(reply) => reply,
            Err(Stop::Error(errno)) => Reply::Error(errno),
            // A worker executes what waits.
            Err(Stop::Lost | Stop::Wait) => return,
        };
        let core = self.shared.lock();
        let (is_lost, has_room) = (core.failed.is_some(), core.room() > 0);
        drop(core);
        if is_lost {
            return;
        }
        let is_call = request.opcode == opcode::WRITE && !is_write_back(request);
        match reply {
            Reply::Bytes(bytes) if is_call && !has_room => {
                let bytes = buffer[..bytes].to_vec();
                self.late.push(LateAnswer { unique: request.unique, bytes });
            }
            reply => self.device.answer(request.unique, &reply, buffer),
        }
    }

    /// Sends late answers until the process ends.
    pub(super) fn answer_late(&self, fetcher: Fetcher) {
        let handler = Handler { shared: Arc::clone(&self.shared), fetcher: Some(fetcher) };
        loop {
            let LateAnswer { unique, bytes } = self.late.pop();
            if handler.wait_for_room(1).is_ok() && self.shared.lock().failed.is_none() {
                self.device.answer(unique, &Reply::Bytes(bytes.len()), &bytes);
            }
        }
    }
}
