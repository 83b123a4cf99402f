//! A queue of a device, and the threads that serve it.
//!
//! Several threads take turns, as with a client's socket in the NBD server. The thread with the
//! turn waits for the guest and for donors, both at once. It starts short requests, and tells the
//! guest of those that have ended ([`intake`](super::intake)). For a request that would have to
//! wait it passes the turn on, executes the request, and tells the guest. When all threads are busy
//! one more is started, up to a bound. Requests in flight lock pages that others may need. So a
//! thread leaves the turn during such requests only if another thread takes it.

use super::Memory;
use super::chain::{Chain, MAX_DESCRIPTORS, Malformed};
use super::drive::Drive;
use super::inflight::Journal;
use super::intake::{Answer, Intake, Todo};
use super::request::{self, NoStatus, PART_BYTES};
use crate::volume::flow::WAIT;
use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::thread::{JoinHandle, Scope};
use virtio_queue::{Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::GuestAddress;

/// Most requests of a queue that are threads' own at a time.
const MAX_THREADS: usize = 16;

/// Threads that all queues of a device may have beside the first one of each.
pub(super) const SPARE_THREADS: usize = 64;

/// The guest's memory; the monitor may exchange it while queues are served.
#[derive(Debug, Default)]
pub(super) struct SharedMemory(RwLock<Arc<Memory>>);

impl SharedMemory {
    /// The memory as it is now.
    pub(super) fn get(&self) -> Arc<Memory> {
        Arc::clone(&self.0.read().expect("no thread panics with the memory"))
    }

    pub(super) fn set(&self, memory: Memory) {
        *self.0.write().expect("no thread panics with the memory") = Arc::new(memory);
    }
}

/// An eventfd of the monitor's, if it has given one.
#[derive(Debug, Default)]
pub(super) struct Signal(Mutex<Option<File>>);

impl Signal {
    pub(super) fn set(&self, file: Option<File>) {
        *self.0.lock().expect("no thread panics with a descriptor") = file;
    }

    pub(super) fn send(&self) {
        if let Some(file) = &*self.0.lock().expect("no thread panics with a descriptor") {
            // A counter that is full has been seen as little as one that is not.
            let _ = rustix::io::write(file, &1u64.to_ne_bytes());
        }
    }
}

/// Where a queue is, and where it begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) descriptors: u16,
    pub(super) table: GuestAddress,
    pub(super) available: GuestAddress,
    pub(super) used: GuestAddress,
    /// The next entry of the available ring, if no journal knows better.
    pub(super) next_available: u16,
    pub(super) has_event_index: bool,
}

/// Resources that serve a queue.
pub(super) struct Parts {
    pub(super) drive: Drive,
    pub(super) memory: Arc<SharedMemory>,
    pub(super) kick: File,
    pub(super) call: Arc<Signal>,
    pub(super) error: Arc<Signal>,
    pub(super) journal: Option<Journal>,
    pub(super) spare_threads: Arc<AtomicUsize>,
}

/// Why a queue cannot be served, or not any longer.
#[derive(Debug, thiserror::Error)]
pub(super) enum RingError {
    #[error("a queue of {0} descriptors")]
    Size(u16),
    #[error(transparent)]
    Ring(#[from] virtio_queue::Error),
    #[error("a queue that is not all in the guest's memory")]
    Outside,
    #[error("a request with head {head} in a queue of {descriptors}")]
    Head { head: u16, descriptors: u16 },
    #[error("nobody will kick the queue any more")]
    Deaf,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A request that is given back to the guest as it is: there is nowhere to say that it failed.
#[derive(Debug, thiserror::Error)]
enum Unanswerable {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    NoStatus(#[from] NoStatus),
}

/// A queue that is served.
pub(super) struct Ring {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    parts: Parts,
    state: Mutex<State>,
    /// Held by whoever has the turn.
    intake: Mutex<Intake>,
    threads: AtomicUsize,
    busy: AtomicUsize,
    /// Readable once the queue is to be stopped.
    stop: OwnedFd,
    is_over: AtomicBool,
    has_complained: AtomicBool,
}

struct State {
    queue: Queue,
    journal: Option<Journal>,
    /// Heads of the requests that a predecessor had in flight.
    again: VecDeque<u16>,
}

impl Ring {
    /// Begins to serve a queue, with what a predecessor had under way first.
    pub(super) fn start(layout: Layout, mut parts: Parts) -> Result<Ring, RingError> {
        let memory = parts.memory.get();
        let mut queue = Queue::new(MAX_DESCRIPTORS)?;
        queue.try_set_size(layout.descriptors).map_err(|_| RingError::Size(layout.descriptors))?;
        queue.try_set_desc_table_address(layout.table)?;
        queue.try_set_avail_ring_address(layout.available)?;
        queue.try_set_used_ring_address(layout.used)?;
        queue.set_event_idx(layout.has_event_index);
        queue.set_ready(true);
        if !queue.is_valid(&*memory) {
            return Err(RingError::Outside);
        }
        let used = queue.used_idx(&*memory, Acquire)?.0;
        queue.set_next_used(used);
        let mut journal = parts.journal.take();
        let mut again = VecDeque::new();
        let mut next_available = layout.next_available;
        if let Some(journal) = &mut journal {
            let resumed = journal.resume(used, next_available);
            next_available = resumed.next_available;
            again = VecDeque::from(resumed.heads);
            if !again.is_empty() {
                let (volume, requests) = (parts.drive.volume.name(), again.len());
                tracing::info!(volume, requests, "requests that were under way are done again");
            }
        }
        queue.set_next_avail(next_available);
        let intake = Intake::new(parts.drive.clone());
        let shared = Arc::new(Shared {
            parts,
            state: Mutex::new(State { queue, journal, again }),
            intake: Mutex::new(intake),
            threads: AtomicUsize::new(1),
            busy: AtomicUsize::new(0),
            stop: eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from)?,
            is_over: AtomicBool::new(false),
            has_complained: AtomicBool::new(false),
        });
        // A predecessor may have finished a request and not have said so.
        shared.parts.call.send();
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("vhost-user".into())
            .spawn(move || std::thread::scope(|scope| serving.work(scope)))?;
        Ok(Ring { shared, thread })
    }

    /// Finishes what is under way, and returns the entry of the available ring that is next.
    pub(super) fn stop(self) -> u16 {
        self.shared.is_over.store(true, Release);
        // An eventfd takes this many times.
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        // One that panicked has ended the process.
        let _ = self.thread.join();
        self.shared.state().queue.next_avail()
    }
}

impl Shared {
    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut part = Box::new([0; PART_BYTES]);
        while let Some(todo) = self.next(scope) {
            self.work_off(todo, &mut part);
            self.busy.fetch_sub(1, AcqRel);
        }
    }

    /// Does what is a thread's own.
    fn work_off(&self, todo: Todo, part: &mut [u8; PART_BYTES]) {
        match todo {
            Todo::Serve(head) => {
                let written = self.serve(&self.parts.memory.get(), head, part);
                self.finish(&[(head, written)]);
            }
            Todo::Finish(unfinished) => {
                let ended = unfinished.finish(&self.parts.drive.volume).into_iter();
                let answers: Vec<Answer> = ended.map(|(asked, end)| asked.answer(end)).collect();
                self.finish(&answers);
            }
        }
    }

    /// Takes the turn until there is something for this thread alone; none when the queue is
    /// stopped.
    fn next<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Option<Todo> {
        let mut intake = self.intake.lock().expect("no thread panics in its turn");
        let todo = loop {
            if let Some(todo) = intake.next() {
                break todo;
            }
            let goes_on = self.advance(&mut intake).unwrap_or_else(|error| {
                self.give_up(&error);
                false
            });
            if !goes_on {
                self.settle(&mut intake);
                break intake.next()?;
            }
        };
        if self.has_successor(scope) {
            return Some(todo);
        }
        self.settle(&mut intake);
        Some(intake.urgent(todo))
    }

    /// Begins what the guest has asked for, and waits for what is next; false when the queue is
    /// stopped.
    fn advance(&self, intake: &mut Intake) -> Result<bool, RingError> {
        while intake.has_room() {
            let Some(head) = self.take()? else {
                // A predecessor's requests are done even then.
                if self.is_over.load(Acquire) {
                    return Ok(false);
                }
                break;
            };
            let (table, descriptors) = self.table();
            intake.begin(self.parts.memory.get(), table, descriptors, head);
        }
        intake.send();
        if intake.has_todo() {
            // Requests for threads of their own may come without a pause in which donors are waited
            // for.
            intake.progress(None);
        }
        self.finish(&intake.answers());
        if intake.has_todo() {
            return Ok(true);
        }
        self.wait(intake)?;
        self.finish(&intake.answers());
        Ok(true)
    }

    /// Waits until nothing is under way that others may wait for.
    fn settle(&self, intake: &mut Intake) {
        intake.send();
        while !intake.is_idle() {
            intake.progress(Some(WAIT));
        }
        self.finish(&intake.answers());
    }

    /// Counts this thread as one without the turn. Returns whether another thread takes the turn.
    fn has_successor<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> bool {
        let busy = self.busy.fetch_add(1, AcqRel) + 1;
        if busy == self.threads.load(Acquire) {
            self.add_thread(scope);
        }
        busy < self.threads.load(Acquire)
    }

    /// Without it, fewer are under way at a time.
    fn add_thread<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        if self.threads.load(Relaxed) >= MAX_THREADS {
            return;
        }
        let spare = &self.parts.spare_threads;
        let less_one = |left: usize| left.checked_sub(1);
        if spare.fetch_update(AcqRel, Acquire, less_one).is_err() {
            return;
        }
        let thread = std::thread::Builder::new().name("vhost-user".into());
        let work = || {
            self.work(scope);
            spare.fetch_add(1, AcqRel);
        };
        match thread.spawn_scoped(scope, work) {
            Ok(_) => self.threads.fetch_add(1, AcqRel),
            Err(_) => spare.fetch_add(1, AcqRel),
        };
    }

    /// Takes the next request that the guest has made, if there is one. If there is none, the guest
    /// kicks for the next.
    fn take(&self) -> Result<Option<u16>, RingError> {
        let memory = self.parts.memory.get();
        let mut state = self.state();
        if let Some(head) = state.again.pop_front() {
            return Ok(Some(head));
        }
        if self.is_over.load(Acquire) {
            return Ok(None);
        }
        let State { queue, journal, .. } = &mut *state;
        queue.disable_notification(&*memory)?;
        loop {
            if let Some(chain) = queue.iter(&*memory)?.next() {
                let (head, descriptors) = (chain.head_index(), queue.size());
                if head >= descriptors {
                    return Err(RingError::Head { head, descriptors });
                }
                if let Some(journal) = journal {
                    journal.begin(head);
                }
                return Ok(Some(head));
            }
            if !queue.enable_notification(&*memory)? {
                return Ok(None);
            }
        }
    }

    /// Waits until the guest kicks, donors have answered, or the queue is stopped.
    fn wait(&self, intake: &mut Intake) -> Result<(), RingError> {
        let kick = &self.parts.kick;
        let [kicked, stopped] = intake.wait(kick.as_fd(), self.stop.as_fd())?;
        if kicked.contains(PollFlags::IN) {
            let mut count = [0; 8];
            match rustix::io::read(kick, &mut count) {
                Ok(0) => return Err(RingError::Deaf),
                Ok(_) | Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        } else if !kicked.is_empty() && stopped.is_empty() {
            return Err(RingError::Deaf);
        }
        Ok(())
    }

    /// Where the queue's descriptors are, and how many.
    fn table(&self) -> (GuestAddress, u16) {
        let state = self.state();
        (GuestAddress(state.queue.desc_table()), state.queue.size())
    }

    /// Does what is asked, as far as it is a request, and returns how much was answered.
    fn serve(&self, memory: &Memory, head: u16, part: &mut [u8; PART_BYTES]) -> u32 {
        let (table, descriptors) = self.table();
        let served = Chain::read(memory, table, descriptors, head)
            .map_err(Unanswerable::from)
            .and_then(|chain| Ok(request::serve(&self.parts.drive, memory, &chain, part)?));
        served.unwrap_or_else(|error| {
            if !self.has_complained.swap(true, Relaxed) {
                let volume = self.parts.drive.volume.name();
                tracing::warn!(volume, %error, "a guest's request cannot be answered; no further one is named");
            }
            0
        })
    }

    /// Tells the guest that requests are finished.
    fn finish(&self, answers: &[Answer]) {
        if answers.is_empty() {
            return;
        }
        match self.give_back(answers) {
            Ok(true) => self.parts.call.send(),
            Ok(false) => {}
            Err(error) => self.give_up(&error),
        }
    }

    /// Whether the guest is to be called.
    fn give_back(&self, answers: &[Answer]) -> Result<bool, RingError> {
        let memory = self.parts.memory.get();
        let mut state = self.state();
        let State { queue, journal, .. } = &mut *state;
        for (head, written) in answers {
            if let Some(journal) = journal {
                journal.finishing(*head);
            }
            queue.add_used(&*memory, *head, *written)?;
            if let Some(journal) = journal {
                journal.finished(*head, queue.next_used());
            }
        }
        Ok(queue.needs_notification(&*memory)?)
    }

    /// Serves the queue no longer: the guest has to set it up anew.
    fn give_up(&self, error: &RingError) {
        if !self.is_over.swap(true, AcqRel) {
            let volume = self.parts.drive.volume.name();
            tracing::warn!(volume, %error, "a guest's queue cannot be served");
            self.parts.error.send();
        }
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with the queue")
    }
}
