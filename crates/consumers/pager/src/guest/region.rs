//! One region of guest RAM, and how it is written down for a successor.

use super::memory_file::MemoryFile;
use super::span::Span;
use crate::state::{REGION_WORDS, State};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// A region of guest RAM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) span: Span,
    /// Its file, if the pager has it.
    pub(super) file: Option<MemoryFile>,
    /// Serial number of the file's hand-over; 0 without a file.
    pub(super) serial: u64,
    /// Where the machine's RAM continues with it, in bytes.
    pub(super) position: u64,
    /// Its place in the state file.
    pub(super) saved_at: usize,
}

impl Region {
    /// Where the page at `address` is in the file.
    pub(super) fn offset_of(&self, address: u64) -> u64 {
        address - self.span.start + self.span.offset
    }

    /// Words in the state file: address space plus one (0: free), descriptor plus one, then as
    /// named.
    pub(super) fn save(&self, state: &State, space: usize) {
        let words = &state.regions[self.saved_at * REGION_WORDS..][..REGION_WORDS];
        words[1].store(self.file.map_or(0, |file| file.0 as u64 + 1), Relaxed);
        words[2].store(self.span.start, Relaxed);
        words[3].store(self.span.len, Relaxed);
        words[4].store(self.span.offset, Relaxed);
        words[5].store(self.serial, Relaxed);
        words[6].store(self.position, Relaxed);
        words[0].store(space as u64 + 1, Release);
    }

    pub(super) fn load(state: &State, saved_at: usize, space: usize) -> Option<Region> {
        let words = &state.regions[saved_at * REGION_WORDS..][..REGION_WORDS];
        let word = |i: usize| words[i].load(Relaxed);
        if word(0) != space as u64 + 1 {
            return None;
        }
        let file = (word(1) as RawFd).checked_sub(1).filter(|&fd| fd >= 0).map(MemoryFile);
        let identity = file.and_then(|file| file.facts().ok()).map(|facts| facts.identity);
        let span = Span { start: word(2), len: word(3), offset: word(4), file: identity };
        Some(Region { span, file, serial: word(5), position: word(6), saved_at })
    }

    pub(super) fn erase(state: &State, saved_at: usize) {
        state.regions[saved_at * REGION_WORDS].store(0, Release);
    }
}
