//! Requests through io_uring (Linux 6.14): one system call gives an answer and takes the next
//! request.
//!
//! io_uring is opt-in, because the kernel keeps no request of a killed process for its successor.
//! When the rings of that process end, some of their requests fail. The kernel sends the requests
//! that the process had read to no other process, not even after [`super::Mount::resend`]. So the
//! file is mounted anew then ([`super::Mount::replace`]).
//!
//! The kernel has a queue for each processor, and puts a request into that of the processor where
//! it was made. Each queue has some entries, for one request at a time each, and here each entry
//! has a thread, with a ring of its own. So nothing is handed from one thread to another, and a
//! request that takes long holds up no other.
//!
//! | module | what it is about |
//! |---|---|
//! | `abi` | the kernel's numbers, and what they are made of |
//! | `entry` | one entry of a queue |

mod abi;
mod entry;
#[cfg(test)]
mod tests;

use super::server::Mounted;
use entry::Entry;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Entries of all queues together, unless that would be fewer than [`LEAST_OF_QUEUE`] of each.
const ENTRIES: usize = 64;

/// Least and most entries of a queue.
const LEAST_OF_QUEUE: usize = 4;
const MOST_OF_QUEUE: usize = 16;

/// Most queues. A machine with more processors has no requests through io_uring.
const MOST_QUEUES: usize = 128;

/// Where the kernel says which processors there may ever be.
const PROCESSORS: &str = "/sys/devices/system/cpu/possible";

/// Threads that wait for the kernel to want requests through io_uring.
pub(super) struct Queues {
    begin: Vec<Sender<()>>,
    reports: Receiver<io::Result<()>>,
}

impl Queues {
    /// All that can be refused is done before the kernel is told that requests are to come this
    /// way.
    pub(super) fn prepare(mounted: &Arc<Mounted>) -> io::Result<Queues> {
        let queues = processors(&fs::read_to_string(PROCESSORS)?)?;
        if queues > MOST_QUEUES {
            return Err(io::Error::other(format!("{queues} processors are too many")));
        }
        let (report, reports) = channel();
        let mut begin = Vec::new();
        for queue in 0..queues {
            for _ in 0..entries_of_queue(queues) {
                let (sender, may_begin) = channel();
                begin.push(sender);
                let (mounted, report) = (Arc::clone(mounted), report.clone());
                let queue = u16::try_from(queue).expect("they are not so many");
                let thread = thread::Builder::new().name("fuse-uring".into());
                thread.spawn(move || work(&mounted, queue, &report, &may_begin))?;
            }
        }
        let queues = Queues { begin, reports };
        queues.hear().map(|()| queues)
    }

    /// After the kernel was told.
    pub(super) fn begin(self, volume: &str) {
        for thread in &self.begin {
            // One that has panicked has ended the process.
            let _ = thread.send(());
        }
        if let Err(error) = self.hear() {
            tracing::warn!(volume, %error, "the kernel takes less than all of a file's io_uring");
        }
    }

    /// Receives one report of each thread, up to the first error.
    fn hear(&self) -> io::Result<()> {
        self.reports.iter().take(self.begin.len()).try_for_each(|said| said)
    }
}

fn work(mounted: &Mounted, queue: u16, report: &Sender<io::Result<()>>, may_begin: &Receiver<()>) {
    // A failed send is ignored: the receiver hears all threads, or gives all of them up.
    let say = |what| drop(report.send(what));
    let mut entry = match Entry::new(mounted, queue) {
        Ok(entry) => entry,
        Err(error) => return say(Err(error)),
    };
    say(Ok(()));
    if may_begin.recv().is_err() {
        return;
    }
    match entry.register() {
        Ok(()) => say(Ok(())),
        Err(error) => return say(Err(error)),
    }
    if let Err(error) = entry.serve() {
        let volume = mounted.file.name();
        tracing::error!(volume, queue, %error, "requests for a file do not come any more");
    }
}

fn entries_of_queue(queues: usize) -> usize {
    (ENTRIES / queues).clamp(LEAST_OF_QUEUE, MOST_OF_QUEUE)
}

/// How many processors a list of them has, which is written `0-3,8`.
fn processors(list: &str) -> io::Result<usize> {
    let of_part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    let all = list.trim().split(',').try_fold(0usize, |sum, part| sum.checked_add(of_part(part)?));
    all.ok_or_else(|| io::Error::other(format!("`{list}` is no list of processors")))
}
