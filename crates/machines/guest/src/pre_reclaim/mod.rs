//! Pre-reclamation: once the host asks for memory, the guest readies more of it in the background,
//! and takes it back into use when the host has been silent for a while ("Memory-Harvesting VMs in
//! Cloud Platforms", 2022, section 4.4).
//!
//! Memory is readied by taking whole memory blocks offline: the kernel moves what is in them
//! elsewhere, and virtio-mem's driver gives offline blocks back first, without another look at
//! their pages. Two other ways were tried, and are worse: free huge pages (`nr_hugepages`) have to
//! be let go again before they can be unplugged, and the driver then does all its work anew;
//! compaction makes room, and holds it for nobody. `docs/harvesting.md` has the figures.
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
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often it is looked whether the host has asked: it takes hundreds of MiB in a second, of
/// which every tenth that is not readied is one that it works for itself.
const INTERVAL: Duration = Duration::from_millis(50);

/// The governor's input to the thread that readies memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Owed {
    /// Bytes that the host has announced and not taken yet; `None` without an announcement.
    pub(crate) announced_bytes: Option<u64>,
    /// Bytes that must stay free.
    pub(crate) free_bytes: u64,
}

/// State shared by the thread that readies memory and the manager's thread.
#[derive(Debug, Default)]
struct Shared {
    owed: Owed,
    readied_bytes: u64,
    /// Blocks are just being taken, or given back: whether the kernel counts them is not known.
    uncertain_bytes: u64,
    /// For what is announced nothing more can be readied.
    is_done: bool,
}

/// The shared state, and the condition variable that signals its changes.
#[derive(Debug, Default)]
struct Common {
    shared: Mutex<Shared>,
    changed: Condvar,
}

impl Common {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("no thread panics with what is readied")
    }

    /// Until the next look, or until something has changed.
    fn wait(&self) {
        let shared = self.lock();
        let waited = self.changed.wait_timeout(shared, INTERVAL);
        drop(waited.expect("no thread panics with what is readied"));
    }
}

/// Readies memory until it is dropped; what is readied then is in use again.
#[derive(Debug)]
pub(crate) struct PreReclaimer {
    common: Arc<Common>,
    ending: Ending,
    last: Memory,
    thread: Option<JoinHandle<()>>,
}

impl PreReclaimer {
    /// No more than `ahead_bytes` at once. `root` is where the kernel has `proc` and `sys`.
    pub(crate) fn start(ahead_bytes: u64, root: &Path) -> io::Result<PreReclaimer> {
        let common = Arc::new(Common::default());
        let ending = Ending::default();
        let thread = thread::Builder::new().name("pre-reclaim".into()).spawn({
            let (common, ending, root) = (Arc::clone(&common), ending.clone(), root.to_owned());
            move || run(ahead_bytes, root, &common, &ending)
        })?;
        Ok(PreReclaimer { common, ending, last: Memory::default(), thread: Some(thread) })
    }

    /// The memory with what is readied: it is the guest's still, and free. Beside it, what is
    /// readied, in bytes.
    pub(crate) fn with_readied(
        &mut self,
        read: impl FnOnce() -> io::Result<Memory>,
    ) -> io::Result<(Memory, u64)> {
        let shared = self.common.lock();
        let mut memory = read()?;
        memory.total_bytes += shared.readied_bytes;
        memory.available_bytes += shared.readied_bytes;
        // A difference of at most the uncertain bytes comes from blocks in transition.
        let differs = self.last.total_bytes.abs_diff(memory.total_bytes);
        if differs <= shared.uncertain_bytes {
            memory.available_bytes =
                memory.available_bytes.saturating_add_signed(signed(&self.last, &memory));
            memory.total_bytes = self.last.total_bytes;
        }
        self.last = memory;
        Ok((memory, shared.readied_bytes))
    }

    /// Sets the bytes that the host will take and the bytes that must stay free.
    pub(crate) fn owes(&self, owed: Owed) {
        let mut shared = self.common.lock();
        // As the host takes, less is owed: what was done for it is done still.
        let was = std::mem::replace(&mut shared.owed, owed).announced_bytes;
        if owed.announced_bytes > was {
            shared.is_done = false;
            self.common.changed.notify_all();
        }
    }

    /// Whether nothing more can be readied for what was announced.
    pub(crate) fn is_done(&self) -> bool {
        self.common.lock().is_done
    }
}

/// How much more memory there was than there is.
fn signed(last: &Memory, memory: &Memory) -> i64 {
    last.total_bytes as i64 - memory.total_bytes as i64
}

impl Drop for PreReclaimer {
    fn drop(&mut self) {
        self.ending.set();
        self.common.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

fn run(ahead_bytes: u64, root: PathBuf, common: &Common, ending: &Ending) {
    work(ahead_bytes, root, common, ending);
    // Nobody is to wait for what is done by nobody.
    common.lock().is_done = true;
}

fn work(ahead_bytes: u64, root: PathBuf, common: &Common, ending: &Ending) {
    let begun = Instant::now();
    let mut plan = Plan::new(ahead_bytes);
    let mut blocks = match Blocks::open(root) {
        Ok(blocks) => blocks,
        Err(error) => return tracing::warn!(%error, "no memory can be readied beforehand"),
    };
    // A manager that was killed may have left blocks offline.
    give_back_all(&mut blocks, common);
    while !ending.is_set() {
        // Memory as it is at this moment: what the driver gives it asks nobody for, and blocks that
        // are readied are gone at once.
        let looked = blocks.look().and_then(|()| kernel_memory());
        let step = match looked {
            Ok(memory) => {
                let mut shared = common.lock();
                // Blocks that the driver has given to the host no longer count as readied.
                shared.readied_bytes = blocks.readied_bytes();
                let view = View {
                    total_bytes: memory.total_bytes + shared.readied_bytes,
                    readied_bytes: shared.readied_bytes,
                    block_bytes: blocks.block_bytes(),
                    announced_bytes: shared.owed.announced_bytes,
                    spare_bytes: memory.available_bytes.saturating_sub(shared.owed.free_bytes),
                };
                let step = plan.step(&view, begun.elapsed());
                shared.is_done = !matches!(step, Step::Ready(_));
                step
            }
            Err(error) => {
                tracing::warn!(%error, "memory blocks cannot be read");
                common.lock().is_done = true;
                Step::Rest
            }
        };
        match step {
            Step::Ready(count) if ready(count, &mut blocks, common, ending) => continue,
            Step::Ready(_) => common.lock().is_done = true,
            Step::GiveBack => give_back_all(&mut blocks, common),
            Step::Rest => {}
        }
        common.wait();
    }
    give_back_all(&mut blocks, common);
}

/// Whether there was one to ready.
fn ready(count: u64, blocks: &mut Blocks, common: &Common, ending: &Ending) -> bool {
    common.lock().uncertain_bytes = count * blocks.block_bytes();
    let readied = blocks.ready(count, ending);
    let mut shared = common.lock();
    (shared.readied_bytes, shared.uncertain_bytes) = (blocks.readied_bytes(), 0);
    readied
}

fn give_back_all(blocks: &mut Blocks, common: &Common) {
    loop {
        common.lock().uncertain_bytes = blocks.block_bytes();
        let is_more = blocks.give_back_one();
        let mut shared = common.lock();
        (shared.readied_bytes, shared.uncertain_bytes) = (blocks.readied_bytes(), 0);
        if !is_more {
            return;
        }
    }
}
