//! Says which faults the evictor itself causes when it reads a program's memory in place.
//!
//! The evictor checks that a page is there before it reads the page. The program may free the page
//! in between. Then the kernel reports a fault of the evictor's thread, which is answered at once
//! ([`crate::fault`]): the evictor would wait for itself.

use crate::state::tables::Key;

/// The pages that the evictor reads in place at this moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnReads {
    /// The evictor's thread, by its number in the pager's PID namespace.
    thread: u32,
    pages: Vec<Key>,
    /// Pages that a program has freed, and that are there again for the evictor's sake.
    filled: Vec<Key>,
}

impl OwnReads {
    /// Reads of the calling thread.
    pub(crate) fn of_this_thread() -> OwnReads {
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        OwnReads { thread, ..OwnReads::default() }
    }

    pub(crate) fn begin(&mut self, pages: impl IntoIterator<Item = Key>) {
        self.pages.extend(pages);
    }

    pub(crate) fn end(&mut self) {
        self.pages.clear();
    }

    /// Whether a thread that reads, and finds nothing there, is the evictor.
    ///
    /// The kernel gives a thread's number in that thread's own PID namespace. So a container's
    /// thread may have the same number as the evictor: the page counts, too. If such a thread meets
    /// a page that the evictor reads, the evictor meets it as well, and the answer is the same.
    ///
    /// A hypervisor's userfaultfd may not tell threads: then they are all 0.
    pub(crate) fn has(&self, page: Key, thread: u32) -> bool {
        thread != 0 && thread == self.thread && self.pages.contains(&page)
    }

    /// Records that a page is there again for the evictor's sake.
    pub(crate) fn filled(&mut self, page: Key) {
        self.filled.push(page);
    }

    /// Records that a program has moved a page that holds nothing.
    pub(crate) fn moved(&mut self, from: Key, to: Key) {
        self.filled.iter_mut().filter(|page| **page == from).for_each(|page| *page = to);
    }

    /// The pages that are there again for the evictor's sake, wherever they are now.
    pub(crate) fn take_filled(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_the_evictors_by_page_and_thread() {
        let mut reads = OwnReads::of_this_thread();
        let (page, thread) = (Key::new(0, 5), reads.thread);
        assert!(!reads.has(page, thread));
        reads.begin([page]);
        assert!(reads.has(page, thread) && !reads.has(page, thread + 1));
        assert!(!reads.has(page.plus(1), thread), "a container's thread may have the same number");
        assert!(!OwnReads { thread: 0, ..reads.clone() }.has(page, 0), "threads are not told");
        reads.end();
        assert!(!reads.has(page, thread));
        reads.filled(page);
        reads.moved(page.plus(3), page.plus(4));
        reads.moved(page, page.plus(1));
        assert_eq!(reads.take_filled(), [page.plus(1)]);
    }
}
