//! Collects pages of other shards for reads whose own donor does not answer, until these suffice.
//!
//! Unlike other reads, decodings allocate memory: this is the path after a failure. The lane's
//! limit on requests in flight bounds the amount.

use crate::coded::code::{Code, Coder};
use crate::lane::requests::Decoded;
use hecaton_memory::{PAGE_SIZE, PageSum, page_sum};
use std::collections::BTreeMap;

/// Pages received for the decodings of one lane.
pub(crate) struct Decodings {
    coder: Option<Coder>,
    /// By decoding, and shard.
    pages: BTreeMap<(u64, usize), Vec<u8>>,
}

impl Decodings {
    /// No pages yet, for a space with this code.
    pub(crate) fn new(code: Option<Code>) -> Decodings {
        Decodings { coder: code.map(Code::coder), pages: BTreeMap::new() }
    }

    /// Pages of a shard have come, `from` being where they begin in the decoding's list.
    pub(crate) fn keep(&mut self, decoding: u64, shard: usize, from: usize, data: &[u8]) {
        let pages = self.pages.entry((decoding, shard)).or_default();
        // They come in order; a second attempt may begin before the end of the first.
        pages.truncate(from * PAGE_SIZE);
        pages.extend_from_slice(data);
    }

    /// Works out pages, and their sums. None if that cannot be: some pages are missing.
    pub(crate) fn complete(
        &mut self,
        decoding: u64,
        decoded: &Decoded,
    ) -> Option<(Vec<u8>, Vec<PageSum>)> {
        let bytes = (decoded.skip + decoded.count) * PAGE_SIZE;
        let mut shards: Vec<Option<Vec<u8>>> = vec![None; decoded.shards];
        for &shard in &decoded.zeros {
            shards[shard] = Some(vec![0; bytes]);
        }
        for &shard in &decoded.come {
            shards[shard] = self.pages.remove(&(decoding, shard));
        }
        let is_all = shards.iter().flatten().all(|pages| pages.len() == bytes);
        let coder = self.coder.as_ref().filter(|_| is_all)?;
        if !coder.complete(&mut shards, &[decoded.wanted]) {
            return None;
        }
        let mut data = shards[decoded.wanted].take()?;
        data.drain(..decoded.skip * PAGE_SIZE);
        let sums = data.chunks(PAGE_SIZE).map(page_sum).collect();
        Some((data, sums))
    }

    /// Lets go of what is of no use any more.
    pub(crate) fn retain(&mut self, is_under_way: impl Fn(u64) -> bool) {
        if !self.pages.is_empty() {
            self.pages.retain(|(decoding, _), _| is_under_way(*decoding));
        }
    }
}

/// Whether pages are what their donor keeps sums of.
pub(crate) fn is_sound(sums: &[PageSum], data: &[u8]) -> bool {
    data.chunks(PAGE_SIZE).zip(sums).all(|(page, sum)| page_sum(page) == *sum)
}
