//! A program's references to pages, as a compact file.
//!
//! A trace is one program's data references, by page, in order, filtered twice. Consecutive
//! references to a page are one. A reference to one of the last [`FILTER_PAGES`] pages in the trace
//! is left out, unless it is the first write among them. Pages that were faulted in this recently
//! are resident under any order, and would be most of the trace. A page in constant use still
//! appears once in every [`FILTER_PAGES`] entries, so an order that evicts it pays. A program with
//! many pages in constant use is recorded with a longer filter.
//!
//! The file: `HCTRACE2`, the number of entries, then tokens of LEB128 varints. A token is
//! `zigzag(page - previous page) << 3 | other << 2 | write << 1 | run`. With `other`, the number of
//! the thread follows. It is 1 until one is named, and stays until another is. With `run`, a count
//! of further entries by the same step and with the same `write` follows.

use std::collections::VecDeque;

/// Entries that a page must be away from the end of the trace to be entered again.
pub const FILTER_PAGES: usize = 64;

const MAGIC: &[u8] = b"HCTRACE2";

/// The thread of the first entries.
pub const FIRST_THREAD: u32 = 1;

/// Longest varint of 64 bits.
const MAX_VARINT_BYTES: u32 = 10;

/// One reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reference {
    /// The virtual page number.
    pub page: u64,
    /// Whether it was written to.
    pub write: bool,
    /// Which of the program's threads it was.
    pub thread: u32,
}

impl Reference {
    /// By a program's only thread.
    pub fn new(page: u64, write: bool) -> Reference {
        Reference { page, write, thread: FIRST_THREAD }
    }
}

/// Why bytes are not a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TraceError {
    /// The first bytes are others.
    #[error("not a page trace: it does not begin with HCTRACE2")]
    Magic,
    /// The tokens end early, run over, or are no varints.
    #[error("the page trace is damaged at byte {0}; record it anew")]
    Damaged(usize),
}

/// Builds a trace, reference by reference.
pub struct Recorder {
    references: Vec<Reference>,
    recent: VecDeque<Reference>,
    filter_pages: usize,
}

impl Recorder {
    /// An empty trace, whose entries are `filter_pages` away from one another if they are for one
    /// page.
    pub fn new(filter_pages: usize) -> Recorder {
        Recorder { references: Vec::new(), recent: VecDeque::new(), filter_pages }
    }

    /// Takes the program's next reference. True if it entered the trace.
    pub fn record(&mut self, reference: Reference) -> bool {
        // Newest first: most references are to the page that was just entered.
        if let Some(known) = self.recent.iter_mut().rev().find(|r| r.page == reference.page) {
            if known.write || !reference.write {
                return false;
            }
            known.write = true;
        } else {
            if self.recent.len() == self.filter_pages {
                self.recent.pop_front();
            }
            self.recent.push_back(reference);
        }
        self.references.push(reference);
        true
    }

    /// The trace so far.
    pub fn references(&self) -> &[Reference] {
        &self.references
    }
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn step_token(previous: u64, reference: Reference) -> u64 {
    let step = reference.page.wrapping_sub(previous) as i64;
    let zigzag = ((step << 1) ^ (step >> 63)) as u64;
    zigzag << 3 | u64::from(reference.write) << 1
}

/// The file of a trace. Page numbers are below 2^60.
pub fn encode(references: &[Reference]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    put_varint(&mut out, references.len() as u64);
    let mut previous = 0;
    let mut thread = FIRST_THREAD;
    let mut rest = references;
    while let Some((&first, more)) = rest.split_first() {
        let token = step_token(previous, first);
        let other = std::mem::replace(&mut thread, first.thread) != first.thread;
        previous = first.page;
        let mut run = 0;
        for &next in more {
            if next.thread != thread || step_token(previous, next) != token {
                break;
            }
            previous = next.page;
            run += 1;
        }
        put_varint(&mut out, token | u64::from(other) << 2 | u64::from(run > 0));
        if other {
            put_varint(&mut out, thread.into());
        }
        if run > 0 {
            put_varint(&mut out, run as u64);
        }
        rest = &more[run..];
    }
    out
}

struct Bytes<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Bytes<'_> {
    fn varint(&mut self) -> Result<u64, TraceError> {
        let mut value = 0;
        for place in 0..MAX_VARINT_BYTES {
            let byte = *self.bytes.get(self.at).ok_or(TraceError::Damaged(self.at))?;
            self.at += 1;
            value |= u64::from(byte & 0x7f) << (7 * place);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(TraceError::Damaged(self.at))
    }
}

/// The trace in a file's bytes.
///
/// # Errors
///
/// If the bytes are no trace, or a damaged one.
pub fn decode(bytes: &[u8]) -> Result<Vec<Reference>, TraceError> {
    let bytes = bytes.strip_prefix(MAGIC).ok_or(TraceError::Magic)?;
    let mut bytes = Bytes { bytes, at: 0 };
    let total = bytes.varint()?;
    let mut references = Vec::new();
    let mut page = 0u64;
    let mut thread = FIRST_THREAD;
    while (references.len() as u64) < total {
        let token = bytes.varint()?;
        if token & 4 != 0 {
            let other = bytes.varint()?;
            thread = u32::try_from(other).map_err(|_| TraceError::Damaged(bytes.at))?;
        }
        let run = if token & 1 == 1 { bytes.varint()? } else { 0 };
        if run >= total - references.len() as u64 {
            return Err(TraceError::Damaged(bytes.at));
        }
        let zigzag = token >> 3;
        let step = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
        for _ in 0..=run {
            page = page.wrapping_add_signed(step);
            references.push(Reference { page, write: token & 2 != 0, thread });
        }
    }
    if bytes.at == bytes.bytes.len() { Ok(references) } else { Err(TraceError::Damaged(bytes.at)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_recorder_keeps_first_writes_and_the_regularly_used() {
        let mut recorder = Recorder::new(FILTER_PAGES);
        let mut record = |page, write| recorder.record(Reference::new(page, write));
        assert!(record(7, false));
        assert!(!record(7, false));
        assert!(record(7, true));
        assert!(!record(7, true));
        let again = (100..1000).filter(|&other| {
            record(other, false);
            record(7, false)
        });
        assert!(again.count() >= 900 / FILTER_PAGES);
    }

    #[test]
    fn a_sweep_takes_a_few_bytes() {
        let sweep: Vec<_> = (5000..9000).map(|page| Reference::new(page, true)).collect();
        assert!(encode(&sweep).len() < 24);
    }

    #[test]
    fn damage_is_an_error() {
        let bytes = encode(&[Reference { page: 9, write: true, thread: 300 }; 3]);
        assert_eq!(decode(&bytes[1..]), Err(TraceError::Magic));
        for end in 8..bytes.len() {
            assert!(matches!(decode(&bytes[..end]), Err(TraceError::Damaged(_))));
        }
        let endless = [MAGIC, &[0x7f, 1, 0xff, 0xff, 0xff, 0xff, 0x0f]].concat();
        assert!(matches!(decode(&endless), Err(TraceError::Damaged(_))));
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_decoded(
            pages in prop::collection::vec((0u64..1 << 60, any::<bool>(), any::<u32>()), 0..200),
            near in prop::collection::vec((0u64..4, any::<bool>(), 1u32..3), 0..200),
        ) {
            let all = pages.into_iter().chain(near);
            let trace: Vec<_> =
                all.map(|(page, write, thread)| Reference { page, write, thread }).collect();
            prop_assert_eq!(decode(&encode(&trace)).unwrap(), trace);
        }

        #[test]
        fn any_bytes_are_a_trace_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&[MAGIC, &[50], &bytes[..]].concat());
        }
    }
}
