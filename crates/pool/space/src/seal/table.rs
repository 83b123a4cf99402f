//! Keeps a space's key and the seals of its pages in memory that outlives the process.
//!
//! Key and seals together open the pages that donors hold sealed. Besides the memory of the process
//! that uses it, this table is the only place of the key. The key goes where the table goes: to the
//! node, which keeps the table for the next process, and nowhere else. When the last of them closes
//! the file, the kernel frees its memory.
//!
//! The table counts versions too. A version is drawn before anything is sealed with it, so a
//! successor never draws a version that a killed process has used. The writer of a page decides
//! when its seal is noted. A kill during the noting leaves a seal that opens nothing: the successor
//! must then write that page before it reads it.

use crate::seal::{KEY_BYTES, Seal, Sealer, TAG_BYTES};
use hecaton_memory::{PageNo, random_u64};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::fmt;
use std::ptr;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// Words of a page's seal: its version, and its tag.
pub const SEAL_WORDS: usize = 1 + TAG_BYTES / 8;

const KEY_WORDS: usize = KEY_BYTES / 8;

/// Words of the key, of its flag and of the version counter.
pub const KEYS_WORDS: usize = KEY_WORDS + 2;

const IS_MADE: usize = KEY_WORDS;
const LAST_VERSION: usize = KEY_WORDS + 1;

/// The key, and the seals of all pages of a space.
#[derive(Clone, Copy)]
pub struct SealTable<'a> {
    /// The key, whether it was made, and the last version that was drawn.
    keys: &'a [AtomicU64],
    /// [`SEAL_WORDS`] for each page of the space.
    seals: &'a [AtomicU64],
}

impl<'a> SealTable<'a> {
    /// The table in these words: [`KEYS_WORDS`], and [`SEAL_WORDS`] per page. A new one is zero.
    pub fn at(keys: &'a [AtomicU64], seals: &'a [AtomicU64]) -> SealTable<'a> {
        SealTable { keys, seals }
    }

    /// Returns the sealer of the space's pages. The first call makes the key; only one thread
    /// runs then. From then on, the key in table and sealer stays out of swap and core dumps.
    pub fn sealer(&self) -> Box<Sealer> {
        let sealer = Box::new(Sealer::new(&self.key()));
        keep_off_disk(self.keys);
        keep_off_disk(&*sealer);
        sealer
    }

    fn key(&self) -> [u8; KEY_BYTES] {
        if self.keys[IS_MADE].load(Acquire) == 0 {
            // A process that is killed in here has sealed nothing yet.
            self.keys[..KEY_WORDS].iter().for_each(|word| word.store(random_u64(), Relaxed));
            self.keys[IS_MADE].store(1, Release);
        }
        let mut key = [0; KEY_BYTES];
        for (bytes, word) in key.chunks_exact_mut(8).zip(self.keys) {
            bytes.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
        }
        key
    }

    /// Draws a version that was never used with this key.
    pub fn draw_version(&self) -> u64 {
        // 2^64 pages are not written in the life of a machine.
        self.keys[LAST_VERSION].fetch_add(1, AcqRel) + 1
    }

    /// The seal that was last noted of the page.
    pub fn get(&self, page: PageNo) -> Seal {
        let words = self.words(page);
        let mut tag = [0; TAG_BYTES];
        for (bytes, word) in tag.chunks_exact_mut(8).zip(&words[1..]) {
            bytes.copy_from_slice(&word.load(Acquire).to_ne_bytes());
        }
        Seal { version: words[0].load(Acquire), tag }
    }

    /// Notes a page's seal. A kill between the stores leaves a seal that opens nothing.
    pub fn set(&self, page: PageNo, seal: &Seal) {
        let words = self.words(page);
        words[0].store(seal.version, Release);
        for (bytes, word) in seal.tag.chunks_exact(8).zip(&words[1..]) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("of this length")), Release);
        }
    }

    fn words(&self, page: PageNo) -> &'a [AtomicU64] {
        &self.seals[page as usize * SEAL_WORDS..][..SEAL_WORDS]
    }
}

/// Prints nothing of the key.
impl fmt::Debug for SealTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealTable")
    }
}

/// Keeps the pages that hold a key out of swap, and the process out of core dumps.
fn keep_off_disk<T: ?Sized>(key: &T) {
    let (at, bytes) = (ptr::from_ref(key).cast_mut().cast(), size_of_val(key));
    // SAFETY: the locked range is that of a reference, and locking changes nothing in it. It is
    // never unlocked: freed memory may still contain the key.
    if let Err(error) = unsafe { rustix::mm::mlock(at, bytes) } {
        tracing::warn!(%error, "the key of this space cannot be locked into memory: it may be swapped");
    }
    // One byte is less than any dump. Only with this limit, the kernel does not start the handler
    // in /proc/sys/kernel/core_pattern either: with 0 it would.
    let none = Rlimit { current: Some(1), maximum: Some(1) };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::warn!(%error, "the key of this space would be in a core dump of its process");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_memory::PAGE_SIZE;

    /// The words of a space of `pages` pages.
    fn words(pages: usize) -> (Vec<AtomicU64>, Vec<AtomicU64>) {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        (zeros(KEYS_WORDS), zeros(pages * SEAL_WORDS))
    }

    #[test]
    fn each_space_has_a_key_of_its_own_and_successors_have_it_too() {
        let (one, other) = (words(1), words(1));
        let table = |words: &(Vec<_>, Vec<_>)| SealTable::at(&words.0, &words.1).key();
        let key = table(&one);
        assert_eq!(table(&one), key);
        assert_ne!(table(&other), key);
        assert_ne!(key, [0; KEY_BYTES]);
    }

    #[test]
    fn a_successor_opens_what_was_sealed_and_draws_other_versions() {
        let words = words(3);
        let table = SealTable::at(&words.0, &words.1);
        let mut page = [7; PAGE_SIZE];
        table.set(2, &table.sealer().seal(2, table.draw_version(), &mut page));
        let successor = SealTable::at(&words.0, &words.1);
        assert_eq!(successor.sealer().open(2, &successor.get(2), &mut page), Ok(()));
        assert_eq!(page, [7; PAGE_SIZE]);
        assert!(successor.draw_version() > successor.get(2).version);
        assert_eq!(successor.get(1).version, 0, "no version is that of a page without a seal");
        assert_eq!(format!("{table:?}"), "SealTable");
    }
}
