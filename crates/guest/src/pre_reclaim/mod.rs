//! Pre-reclamation: once the host asks for memory, the guest readies more of it in the background, and takes it back into
//! use when the host has been silent for a while ("Memory-Harvesting VMs in Cloud Platforms", 2022, section 4.4).
//!
//! Memory is readied by taking whole memory blocks offline: the kernel moves what is in them elsewhere, and virtio-mem's
//! driver gives offline blocks back first, without another look at their pages. Two other ways were tried, and are worse:
//! free huge pages (`nr_hugepages`) have to be let go again before they can be unplugged, and the driver then does all its
//! work anew; compaction makes room, and holds it for nobody. `docs/harvesting.md` has the figures.
//!
//! A thread of its own does it, since a block that is in use takes its time.

mod blocks;
mod plan;

use crate::governor::Memory;
use crate::manager::kernel_memory;
use crate::sink::Ending;
use blocks::Blocks;
use plan::{Plan, Step, View};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often it is looked whether the host has asked.
const INTERVAL: Duration = Duration::from_millis(200);

/// What the governor knows, for those who ready memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Owed {
    /// What the host has announced that it will take still; none if it has announced nothing.
    pub(crate) announced_bytes: Option<u64>,
    /// What is to be left free, in bytes.
    pub(crate) free_bytes: u64,
}

/// What the thread and the manager's share.
#[derive(Debug, Default)]
struct Shared {
    owed: Owed,
    readied_bytes: u64,
    /// A block is just being taken, or given back: whether the kernel counts it is not known.
    uncertain_bytes: u64,
}

/// Readies memory until it is dropped; what is readied then is in use again.
#[derive(Debug)]
pub(crate) struct PreReclaimer {
    shared: Arc<Mutex<Shared>>,
    ending: Ending,
    last: Memory,
    thread: Option<JoinHandle<()>>,
}

impl PreReclaimer {
    /// No more than `ahead_bytes` at once. `root` is where the kernel has `proc` and `sys`.
    pub(crate) fn start(ahead_bytes: u64, root: &Path) -> io::Result<PreReclaimer> {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let ending = Ending::default();
        let thread = thread::Builder::new().name("pre-reclaim".into()).spawn({
            let (shared, ending, root) = (Arc::clone(&shared), ending.clone(), root.to_owned());
            move || run(ahead_bytes, root, &shared, &ending)
        })?;
        Ok(PreReclaimer { shared, ending, last: Memory::default(), thread: Some(thread) })
    }

    /// The memory with what is readied: it is the guest's still, and free. Beside it, what is readied, in bytes.
    pub(crate) fn with_readied(
        &mut self,
        read: impl FnOnce() -> io::Result<Memory>,
    ) -> io::Result<(Memory, u64)> {
        let shared = lock(&self.shared);
        let mut memory = read()?;
        memory.total_bytes += shared.readied_bytes;
        memory.available_bytes += shared.readied_bytes;
        // What seems to have come or gone in this moment is that block.
        let differs = self.last.total_bytes.abs_diff(memory.total_bytes);
        if differs <= shared.uncertain_bytes {
            memory.available_bytes =
                memory.available_bytes.saturating_add_signed(signed(&self.last, &memory));
            memory.total_bytes = self.last.total_bytes;
        }
        self.last = memory;
        Ok((memory, shared.readied_bytes))
    }

    /// What the host is about to take.
    pub(crate) fn owes(&self, owed: Owed) {
        lock(&self.shared).owed = owed;
    }
}

/// How much more memory there was than there is.
fn signed(last: &Memory, memory: &Memory) -> i64 {
    last.total_bytes as i64 - memory.total_bytes as i64
}

impl Drop for PreReclaimer {
    fn drop(&mut self) {
        self.ending.set();
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().expect("no thread panics with what is readied")
}

fn run(ahead_bytes: u64, root: PathBuf, shared: &Mutex<Shared>, ending: &Ending) {
    let begun = Instant::now();
    let mut plan = Plan::new(ahead_bytes);
    let mut blocks = match Blocks::open(root) {
        Ok(blocks) => blocks,
        Err(error) => return tracing::warn!(%error, "no memory can be readied beforehand"),
    };
    // What a manager that was killed has left.
    give_back_all(&mut blocks, shared);
    while !ending.is_set() {
        // Memory as it is at this moment: what the driver gives it asks nobody for, and blocks that are readied are gone at once.
        let looked = blocks.look().and_then(|plugged| Ok((plugged, kernel_memory()?)));
        let step = match looked {
            Ok((plugged_bytes, memory)) => {
                let mut shared = lock(shared);
                // What the driver has given to the host is readied no more.
                shared.readied_bytes = blocks.readied_bytes();
                let view = View {
                    plugged_bytes,
                    readied_bytes: shared.readied_bytes,
                    block_bytes: blocks.block_bytes(),
                    announced_bytes: shared.owed.announced_bytes,
                    spare_bytes: memory.available_bytes.saturating_sub(shared.owed.free_bytes),
                };
                plan.step(&view, begun.elapsed())
            }
            Err(error) => {
                tracing::warn!(%error, "memory blocks cannot be read");
                Step::Rest
            }
        };
        match step {
            Step::Ready if ready_one(&mut blocks, shared, ending) => continue,
            Step::GiveBack => give_back_all(&mut blocks, shared),
            Step::Ready | Step::Rest => {}
        }
        thread::sleep(INTERVAL);
    }
    give_back_all(&mut blocks, shared);
}

/// Whether there was one to ready.
fn ready_one(blocks: &mut Blocks, shared: &Mutex<Shared>, ending: &Ending) -> bool {
    lock(shared).uncertain_bytes = blocks.block_bytes();
    let readied = blocks.ready_one(ending);
    let mut shared = lock(shared);
    (shared.readied_bytes, shared.uncertain_bytes) = (blocks.readied_bytes(), 0);
    readied
}

fn give_back_all(blocks: &mut Blocks, shared: &Mutex<Shared>) {
    loop {
        lock(shared).uncertain_bytes = blocks.block_bytes();
        let is_more = blocks.give_back_one();
        let mut shared = lock(shared);
        (shared.readied_bytes, shared.uncertain_bytes) = (blocks.readied_bytes(), 0);
        if !is_more {
            return;
        }
    }
}
