//! Pages leave sealed and are opened when they come back, where their owner wants that
//! (`--encrypt`; see [`hecaton_space::seal`]).
//!
//! # Which seal a page has
//!
//! The one thread that writes out seals a page anew each time it sends the page. The new seal
//! replaces the old one at that moment, while the donors still hold nothing or an older version.
//! That is right, because the page is staged until they have acknowledged it, and is read from
//! staging. A page is read from a donor only if it is stored and has no slot. For such a page:
//!
//! - No write is in flight. The seal is of the last contents sent, and stays during the read (an
//!   entry that still waits for the answer names the page all the time).
//! - No earlier write can arrive later. The pages of one request arrive in their order, a failed
//!   request is out of the way before its failure is reported, and writes of a dead pager are
//!   fenced.
//!
//! So a hedged read, a donor that missed a write, or a lying donor brings either the same bytes or
//! bytes that do not open. All copies of a page are the same bytes: one sealing goes to all members
//! of a group, and donors copy from each other what they have.
//!
//! # Versions
//!
//! Each sealing has a version of its own, be it of the same contents sent again. So nothing depends
//! on whether they are the same.

use hecaton_memory::{PAGE_SIZE, PageNo, PageSum, page_sum};
use hecaton_space::seal::Sealer;
use hecaton_space::seal::table::SealTable;
use hecaton_transport::protocol::MAX_PAGES;
use std::sync::Arc;

/// Seals and opens a consumer's pages.
#[derive(Debug)]
pub(crate) struct Sealing {
    sealer: Box<Sealer>,
    table: SealTable<'static>,
}

impl Sealing {
    /// With the key of this state file.
    pub(crate) fn new(table: SealTable<'static>) -> Arc<Sealing> {
        Arc::new(Sealing { sealer: table.sealer(), table })
    }

    /// Seals a page that is about to be sent.
    fn seal(&self, page: PageNo, contents: &mut [u8]) {
        let version = self.table.draw_version();
        self.table.set(page, &self.sealer.seal(page, version, contents));
    }

    /// Opens pages where they were received. Says of each whether it is what was written; what is
    /// left of one that is not means nothing.
    pub(crate) fn open(&self, pages: &[PageNo], data: &mut [u8], is_sound: &mut Vec<bool>) {
        is_sound.clear();
        is_sound.extend(
            pages
                .iter()
                .zip(data.chunks_exact_mut(PAGE_SIZE))
                .map(|(&page, data)| self.sealer.open(page, &self.table.get(page), data).is_ok()),
        );
    }
}

/// The sealed pages of one request, on their way to the kernel.
pub(crate) struct Envelope {
    sealing: Arc<Sealing>,
    bytes: Vec<u8>,
    sums: Vec<PageSum>,
}

impl Envelope {
    /// With room for all the pages that a request may have.
    pub(crate) fn new(sealing: Arc<Sealing>) -> Envelope {
        let (bytes, sums) = (MAX_PAGES * PAGE_SIZE, MAX_PAGES);
        Envelope { sealing, bytes: Vec::with_capacity(bytes), sums: Vec::with_capacity(sums) }
    }

    /// Seals different pages, at most [`MAX_PAGES`]. Returns what is to be sent, and its sums.
    pub(crate) fn seal(&mut self, pages: &[PageNo], contents: &[&[u8]]) -> (&[u8], &[PageSum]) {
        assert!(pages.len() <= MAX_PAGES);
        self.bytes.clear();
        self.sums.clear();
        for (&page, contents) in pages.iter().zip(contents) {
            let at = self.bytes.len();
            self.bytes.extend_from_slice(contents);
            self.sealing.seal(page, &mut self.bytes[at..]);
            self.sums.push(page_sum(&self.bytes[at..]));
        }
        (&self.bytes, &self.sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{SPACE_PAGES, State};
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};
    use std::os::fd::{BorrowedFd, RawFd};

    fn open_state(fd: RawFd) -> State {
        // SAFETY: it is never closed.
        State::open(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap().0
    }

    /// As a pager has it that finds this file.
    fn sealing(fd: RawFd) -> Arc<Sealing> {
        Sealing::new(open_state(fd).seals)
    }

    /// One page, sealed.
    fn sent(sealing: &Arc<Sealing>, page: PageNo, contents: &[u8]) -> Vec<u8> {
        Envelope::new(sealing.clone()).seal(&[page], &[contents]).0.to_vec()
    }

    fn contents(byte: u8) -> Vec<u8> {
        vec![byte; PAGE_SIZE]
    }

    fn opens(sealing: &Sealing, page: PageNo, data: &[u8]) -> Option<Vec<u8>> {
        let (mut data, mut is_sound) = (data.to_vec(), Vec::new());
        sealing.open(&[page], &mut data, &mut is_sound);
        is_sound[0].then_some(data)
    }

    #[test]
    fn each_consumer_has_a_key_of_its_own_and_its_successors_have_it_too() {
        let (one, other) = (State::create().unwrap(), State::create().unwrap());
        let held = sent(&sealing(one), 4, &contents(1));
        assert_eq!(opens(&sealing(one), 4, &held), Some(contents(1)));
        // The seal alone opens nothing.
        open_state(other).seals.set(4, &open_state(one).seals.get(4));
        assert_eq!(opens(&sealing(other), 4, &held), None);
        assert_eq!(format!("{:?}", sealing(one)), "Sealing { sealer: Sealer, table: SealTable }");
    }

    #[test]
    fn a_request_is_sealed_page_by_page() {
        let sealing = sealing(State::create().unwrap());
        let (pages, bytes) = ([4, SPACE_PAGES - 1], [contents(1), contents(1)]);
        let mut envelope = Envelope::new(sealing.clone());
        let (data, sums) = envelope.seal(&pages, &[&bytes[0], &bytes[1]]);
        let (first, second) = data.split_at(PAGE_SIZE);
        assert_ne!(first, second, "equal pages do not look so");
        assert_eq!(sums, [page_sum(first), page_sum(second)], "donors check what they are sent");
        let (mut data, mut is_sound) = (data.to_vec(), Vec::new());
        data[PAGE_SIZE] ^= 1;
        sealing.open(&pages, &mut data, &mut is_sound);
        assert_eq!(is_sound, [true, false]);
        assert_eq!(data[..PAGE_SIZE], bytes[0]);
    }

    #[test]
    fn pages_that_were_swapped_do_not_open() {
        let sealing = sealing(State::create().unwrap());
        let (four, five) = (sent(&sealing, 4, &contents(1)), sent(&sealing, 5, &contents(2)));
        assert_eq!(opens(&sealing, 4, &five), None);
        assert_eq!(opens(&sealing, 5, &four), None);
        assert_eq!(opens(&sealing, 4, &[0; PAGE_SIZE]), None, "nor does what was never written");
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// Sealed and sent, acknowledged or not.
        Send { page: PageNo, byte: u8 },
        /// Killed after a version was drawn, before the seal was noted.
        DieBeforeSealing,
        /// Killed with the seal half written, and started again.
        DieWhileNoting { page: PageNo, words: usize },
        /// Killed at any other time.
        Die,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0..5u64, any::<u8>()).prop_map(|(page, byte)| Step::Send { page, byte }),
            1 => Just(Step::DieBeforeSealing),
            1 => (0..5u64, 0..3usize).prop_map(|(page, words)| Step::DieWhileNoting { page, words }),
            1 => Just(Step::Die),
        ];
        prop::collection::vec(step, 1..60)
    }

    proptest! {
        /// No version is used twice however pagers die, and a page opens as what was sent last.
        #[test]
        fn versions_are_used_once_and_the_last_contents_open(steps in steps()) {
            // A successor maps the same memory, and has nothing else from its predecessor.
            let table = open_state(State::create().unwrap()).seals;
            let mut pager = Sealing::new(table);
            let mut versions = HashSet::new();
            // All pages ever sent, which donors may have kept, and the last send of each page.
            let mut kept: Vec<(PageNo, Vec<u8>)> = Vec::new();
            let mut last: HashMap<PageNo, (usize, u8)> = HashMap::new();
            for step in steps {
                match step {
                    Step::Send { page, byte } => {
                        last.insert(page, (kept.len(), byte));
                        kept.push((page, sent(&pager, page, &contents(byte))));
                        prop_assert!(versions.insert(pager.table.get(page).version));
                    }
                    Step::DieBeforeSealing => {
                        prop_assert!(versions.insert(pager.table.draw_version()));
                        pager = Sealing::new(table);
                    }
                    Step::DieWhileNoting { page, words } => {
                        let before = pager.table.get(page);
                        kept.push((page, sent(&pager, page, &contents(0xEE))));
                        let after = pager.table.get(page);
                        prop_assert!(versions.insert(after.version));
                        let mut torn = after;
                        match words {
                            0 => torn = before,
                            1 => torn.tag = before.tag,
                            _ => torn.tag[8..].copy_from_slice(&before.tag[8..]),
                        }
                        pager.table.set(page, &torn);
                        pager = Sealing::new(table);
                        // It is staged still: the successor sends it again, before it is read.
                        last.insert(page, (kept.len(), 0xEE));
                        kept.push((page, sent(&pager, page, &contents(0xEE))));
                        prop_assert!(versions.insert(pager.table.get(page).version));
                    }
                    Step::Die => pager = Sealing::new(table),
                }
            }
            for (&page, &(newest, byte)) in &last {
                for (index, (of, data)) in kept.iter().enumerate() {
                    let opened = opens(&pager, page, data);
                    let expected = (index == newest).then(|| contents(byte));
                    prop_assert_eq!(opened, expected, "page {} given {} of page {}", page, index, of);
                }
            }
        }
    }
}
