//! Which requests are under way, in memory that the monitor keeps while a device is served by one
//! process after another.
//!
//! The layout and the order of steps are those of the vhost-user specification ("Inflight I/O
//! tracking", split virtqueues), with batches of one. For each queue there are 16 bytes of head and
//! 16 for each descriptor:
//!
//! | word | holds |
//! |---|---|
//! | head 0 | features; unused |
//! | head 1 | version (16 bits), descriptors (16), head finished last (16), used index (16) |
//! | descriptor 0 | under way (8 bits), unused (40), next of the last batch (16) |
//! | descriptor 1 | its place in the order in which requests were taken |
//!
//! A process may be killed between any two stores. A request is marked before it is begun, and the
//! mark goes after the guest can see that it is finished; the used index is noted last. So a
//! successor that finds the guest's used index ahead of the one that is noted knows that the
//! last request is finished, whatever its mark says.

use hecaton_memory::memfd::MemoryError;
use hecaton_memory::words::SharedWords;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

/// The version of the layout.
const VERSION: u16 = 1;

/// In the first word of a descriptor.
const UNDER_WAY: u64 = 1;

const HEAD_WORDS: usize = 2;
const DESCRIPTOR_WORDS: usize = 2;

/// Where all queues of a device note their requests.
#[derive(Debug)]
pub(super) struct Region {
    words: SharedWords,
    queues: u16,
    descriptors: u16,
}

/// Where one queue does.
#[derive(Debug)]
pub(super) struct Journal {
    region: Arc<Region>,
    queue: u16,
    /// Requests that were taken.
    taken: u64,
}

/// Where a queue goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Resumed {
    /// Heads of the requests that were under way, in the order in which they were taken.
    pub(super) heads: Vec<u16>,
    /// The entry of the available ring that is next.
    pub(super) next_available: u16,
}

impl Region {
    /// A new one, of a device with so many queues of so many descriptors.
    pub(super) fn create(queues: u16, descriptors: u16) -> Result<Region, MemoryError> {
        let words = SharedWords::create("hecaton-inflight", words(queues, descriptors), 0)?;
        Ok(Region { words, queues, descriptors })
    }

    /// One that this process or a predecessor has created.
    pub(super) fn from_fd(
        fd: OwnedFd,
        queues: u16,
        descriptors: u16,
    ) -> Result<Region, MemoryError> {
        let words = SharedWords::from_fd(fd, words(queues, descriptors))?;
        Ok(Region { words, queues, descriptors })
    }

    /// Descriptor for the monitor, which keeps it.
    pub(super) fn try_clone_fd(&self) -> std::io::Result<OwnedFd> {
        self.words.as_fd().try_clone_to_owned()
    }

    /// Its size.
    pub(super) fn bytes(&self) -> u64 {
        self.words.wide().len() as u64 * 8
    }

    fn of_queue(&self, queue: u16) -> &[AtomicU64] {
        let each = words(1, self.descriptors);
        &self.words.wide()[usize::from(queue) * each..][..each]
    }
}

fn words(queues: u16, descriptors: u16) -> usize {
    usize::from(queues) * (HEAD_WORDS + DESCRIPTOR_WORDS * usize::from(descriptors))
}

/// The second word of a queue's head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Head {
    version: u16,
    descriptors: u16,
    last: u16,
    used: u16,
}

impl Head {
    fn from_word(word: u64) -> Head {
        let [version, descriptors, last, used] =
            [0, 16, 32, 48].map(|shift| (word >> shift) as u16);
        Head { version, descriptors, last, used }
    }

    fn word(self) -> u64 {
        let Head { version, descriptors, last, used } = self;
        u64::from(version)
            | u64::from(descriptors) << 16
            | u64::from(last) << 32
            | u64::from(used) << 48
    }
}

impl Journal {
    /// That of a queue with so many descriptors; none if the region has no room for it.
    pub(super) fn open(region: Arc<Region>, queue: u16, descriptors: u16) -> Option<Journal> {
        let fits = queue < region.queues && descriptors <= region.descriptors;
        fits.then_some(Journal { region, queue, taken: 0 })
    }

    /// Finds the requests that a predecessor left. `used` is the guest's used index. If the region
    /// says nothing of the queue, it begins at `next_available`.
    pub(super) fn resume(&mut self, used: u16, next_available: u16) -> Resumed {
        let mut head = self.head();
        if head.version != VERSION {
            let descriptors = self.region.descriptors;
            self.set_head(Head { version: VERSION, descriptors, last: 0, used });
            return Resumed { heads: Vec::new(), next_available };
        }
        if head.used != used {
            if head.last < self.region.descriptors {
                self.descriptor(head.last)[0].store(0, Release);
            }
            head.used = used;
            self.set_head(head);
        }
        let order = |at: u16| {
            let [mark, order] = self.descriptor(at) else { unreachable!("two words each") };
            (mark.load(Acquire) & UNDER_WAY != 0).then(|| (order.load(Acquire), at))
        };
        let mut under_way: Vec<_> = (0..self.region.descriptors).filter_map(order).collect();
        under_way.sort_unstable();
        self.taken = under_way.last().map_or(0, |(order, _)| order.wrapping_add(1));
        let heads: Vec<u16> = under_way.into_iter().map(|(_, head)| head).collect();
        // Whatever was taken is finished or under way.
        Resumed { next_available: used.wrapping_add(heads.len() as u16), heads }
    }

    /// A request is taken. Its head is one of the queue's descriptors.
    pub(super) fn begin(&mut self, head: u16) {
        let descriptor = self.descriptor(head);
        descriptor[1].store(self.taken, Release);
        descriptor[0].store(UNDER_WAY, Release);
        self.taken = self.taken.wrapping_add(1);
    }

    /// The guest is about to see that a request is finished.
    pub(super) fn finishing(&self, head: u16) {
        self.set_head(Head { last: head, ..self.head() });
    }

    /// The guest sees it: its used index is this now.
    pub(super) fn finished(&self, head: u16, used: u16) {
        self.descriptor(head)[0].store(0, Release);
        self.set_head(Head { used, ..self.head() });
    }

    fn head(&self) -> Head {
        Head::from_word(self.region.of_queue(self.queue)[1].load(Acquire))
    }

    fn set_head(&self, head: Head) {
        self.region.of_queue(self.queue)[1].store(head.word(), Release);
    }

    fn descriptor(&self, at: u16) -> &[AtomicU64] {
        let first = HEAD_WORDS + DESCRIPTOR_WORDS * usize::from(at);
        &self.region.of_queue(self.queue)[first..][..DESCRIPTOR_WORDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const DESCRIPTORS: u16 = 8;

    fn journal(region: &Arc<Region>) -> Journal {
        Journal::open(Arc::clone(region), 1, DESCRIPTORS).unwrap()
    }

    #[test]
    fn heads_are_words() {
        let head = Head { version: 1, descriptors: 2, last: 3, used: 4 };
        assert_eq!(head.word(), 0x0004_0003_0002_0001);
        assert_eq!(Head::from_word(head.word()), head);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let region = Arc::new(Region::create(2, DESCRIPTORS).unwrap());
        assert!(Journal::open(Arc::clone(&region), 2, DESCRIPTORS).is_none());
        assert!(Journal::open(Arc::clone(&region), 0, DESCRIPTORS + 1).is_none());
        assert!(Region::from_fd(region.try_clone_fd().unwrap(), 64, 1024).is_err());
    }

    /// Action of a queue, and the store after which the process is killed.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// Takes a request; killed before it is marked, or not.
        Take(bool),
        /// Finishes one of those under way; killed after so many of the three steps.
        Finish(usize, u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        let kill_at = prop_oneof![8 => Just(4u8), 1 => 0u8..4];
        prop_oneof![
            prop::bool::weighted(0.1).prop_map(Step::Take),
            (0usize..8, kill_at).prop_map(|(which, at)| Step::Finish(which, at)),
        ]
    }

    proptest! {
        /// Wherever the process is killed: what the guest has not seen finished is done again, in
        /// order, and nothing else is.
        #[test]
        fn nothing_is_lost_or_done_again(
            steps in prop::collection::vec(step(), 0..200), start: u16,
        ) {
            let mut region = Arc::new(Region::create(3, DESCRIPTORS).unwrap());
            // State of the guest: its used index, and the heads that it may use.
            let (mut used, mut free) = (start, (0..DESCRIPTORS).collect::<VecDeque<_>>());
            let mut under_way: Vec<u16> = Vec::new();
            let mut next_available = start;
            let mut queue = journal(&region);
            queue.resume(used, next_available);
            for step in steps {
                let mut is_killed = false;
                match step {
                    Step::Take(killed) => {
                        let Some(head) = free.pop_front() else { continue };
                        if killed {
                            is_killed = true;
                            free.push_back(head);
                        } else {
                            queue.begin(head);
                            under_way.push(head);
                            next_available = next_available.wrapping_add(1);
                        }
                    }
                    Step::Finish(which, kill_at) => {
                        if under_way.is_empty() {
                            continue;
                        }
                        let which = which % under_way.len();
                        let head = under_way[which];
                        is_killed = kill_at < 4;
                        if kill_at > 0 {
                            queue.finishing(head);
                        }
                        if kill_at > 1 {
                            used = used.wrapping_add(1);
                            under_way.remove(which);
                            free.push_back(head);
                        }
                        if kill_at > 3 {
                            queue.finished(head, used);
                        } else if kill_at > 2 {
                            queue.descriptor(head)[0].store(0, Release);
                        }
                    }
                }
                if is_killed {
                    let kept = region.try_clone_fd().unwrap();
                    region = Arc::new(Region::from_fd(kept, 3, DESCRIPTORS).unwrap());
                    queue = journal(&region);
                    let resumed = queue.resume(used, 0);
                    prop_assert_eq!(&resumed.heads, &under_way);
                    prop_assert_eq!(resumed.next_available, next_available);
                }
            }
        }

        /// Whatever a monitor has made of it.
        #[test]
        fn noise_is_no_harm(words in prop::collection::vec(any::<u64>(), 18), used: u16) {
            let region = Arc::new(Region::create(2, DESCRIPTORS).unwrap());
            for (at, word) in words.iter().enumerate() {
                region.of_queue(1)[at].store(*word, Release);
            }
            let resumed = journal(&region).resume(used, 0);
            prop_assert!(resumed.heads.iter().all(|head| *head < DESCRIPTORS));
        }
    }
}
