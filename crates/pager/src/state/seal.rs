//! What opens the pages that donors hold sealed: the space's key, and of each page its seal.
//!
//! This is the only place where the key is, beside the memory of the pager that uses it. It goes where the
//! state file goes: to the node, which keeps it for the next pager, and to nobody else; when the last of
//! them closes the file, the kernel empties its memory.
//!
//! Versions are counted in the file, too, and a version is drawn before anything is sealed with it. So a
//! pager that is killed at any moment has used no version that its successor can draw again.

use hecaton_memory::{PageNo, random_u64};
use hecaton_space::seal::{KEY_BYTES, Seal, TAG_BYTES};
use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// Words of a page's seal: its version, and its tag.
pub(crate) const SEAL_WORDS: usize = 1 + TAG_BYTES / 8;

const KEY_WORDS: usize = KEY_BYTES / 8;

/// Words of [`SealTable::keys`].
pub(crate) const KEYS_WORDS: usize = KEY_WORDS + 2;

const IS_MADE: usize = KEY_WORDS;
const LAST_VERSION: usize = KEY_WORDS + 1;

/// The key, and the seals of all pages; part of [`super::State`].
#[derive(Clone, Copy)]
pub(crate) struct SealTable {
    /// The key, whether it was made, and the last version that was drawn.
    keys: &'static [AtomicU64],
    /// [`SEAL_WORDS`] of each page of the space. Written by the thread that writes pages out, and read
    /// of pages that it does not write: see [`crate::sealing`].
    seals: &'static [AtomicU64],
}

impl SealTable {
    pub(crate) fn at(keys: &'static [AtomicU64], seals: &'static [AtomicU64]) -> SealTable {
        SealTable { keys, seals }
    }

    /// The space's key; made when it is first asked for.
    pub(crate) fn key(&self) -> [u8; KEY_BYTES] {
        if self.keys[IS_MADE].load(Acquire) == 0 {
            // A pager that is killed in here has sealed nothing yet.
            self.keys[..KEY_WORDS].iter().for_each(|word| word.store(random_u64(), Relaxed));
            self.keys[IS_MADE].store(1, Release);
        }
        let mut key = [0; KEY_BYTES];
        for (bytes, word) in key.chunks_exact_mut(8).zip(self.keys) {
            bytes.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
        }
        key
    }

    /// Where the key is.
    pub(crate) fn key_memory(&self) -> &[AtomicU64] {
        self.keys
    }

    /// A version that this key has not had.
    pub(crate) fn draw_version(&self) -> u64 {
        // 2^64 pages are not written in the life of a machine.
        self.keys[LAST_VERSION].fetch_add(1, AcqRel) + 1
    }

    /// The seal of what was last written out under the page's number.
    pub(crate) fn get(&self, page: PageNo) -> Seal {
        let words = self.words(page);
        let mut tag = [0; TAG_BYTES];
        for (bytes, word) in tag.chunks_exact_mut(8).zip(&words[1..]) {
            bytes.copy_from_slice(&word.load(Acquire).to_ne_bytes());
        }
        Seal { version: words[0].load(Acquire), tag }
    }

    /// A kill in between leaves what opens nothing. The page is staged then, and sealed again.
    pub(crate) fn set(&self, page: PageNo, seal: &Seal) {
        let words = self.words(page);
        words[0].store(seal.version, Release);
        for (bytes, word) in seal.tag.chunks_exact(8).zip(&words[1..]) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("of this length")), Release);
        }
    }

    fn words(&self, page: PageNo) -> &[AtomicU64] {
        &self.seals[page as usize * SEAL_WORDS..][..SEAL_WORDS]
    }
}
