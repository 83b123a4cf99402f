//! Signatures of pages, which an erasure code can be computed on.
//!
//! A page's sum tells whether it is what was stored by whoever knows the sum. A parity's is known
//! to nobody but the donor that has it: the borrower keeps sums of its own pages. So that the
//! borrower can tell whether a parity still belongs to the pages that it was made of, and none of
//! them has to travel for it, donors compute an *algebraic signature* (Litwin and Schwarz,
//! "Algebraic Signatures for Scalable Distributed Data Structures", ICDE 2004): a sum of a page's
//! bytes with fixed weights, in the field that the code computes in. That is linear, and so the
//! signature of a parity is what the code makes of the pages' signatures (Schwarz and Miller,
//! "Store, Forget, and Check", ICDCS 2006). CRC32C is linear too, but not over this field.
//!
//! It finds each change within eight bytes that follow each other, and of others all but one in
//! 2^64. It is no stand-in for the sum: who chooses what to change can keep it.

use crate::PAGE_SIZE;

/// Eight sums of a page's bytes, over GF(2^8) with the polynomial 0x11d: of those whose place in
/// the page leaves the same remainder by eight.
pub type PageSignature = [u8; 8];

/// Lanes that are summed up on their own: the compiler makes vector code of that.
const LANES: usize = 8;

/// Weighs the words of a page by powers of 2, of which there are 255.
pub fn page_signature(page: &[u8; PAGE_SIZE]) -> PageSignature {
    let mut lanes = [0; LANES];
    for words in page.as_chunks::<{ 8 * LANES }>().0 {
        for (lane, word) in lanes.iter_mut().zip(words.as_chunks::<8>().0) {
            *lane = doubled(*lane) ^ u64::from_le_bytes(*word);
        }
    }
    // One lane follows the other, as if their words did.
    const WORDS_IN_LANE: usize = PAGE_SIZE / 8 / LANES;
    let total = lanes
        .into_iter()
        .fold(0, |total, lane| (0..WORDS_IN_LANE).fold(total, |total, _| doubled(total)) ^ lane);
    total.to_le_bytes()
}

/// Each of eight bytes times 2, in the field.
fn doubled(bytes: u64) -> u64 {
    const LOWEST: u64 = 0x0101_0101_0101_0101;
    let carried = bytes >> 7 & LOWEST;
    let reduced = carried ^ carried << 2 ^ carried << 3 ^ carried << 4;
    (bytes & !(LOWEST << 7)) << 1 ^ reduced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SplitMix;

    fn page(seed: u64) -> [u8; PAGE_SIZE] {
        let mut mix = SplitMix::new(seed);
        let mut page = [0; PAGE_SIZE];
        page.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = mix.draw().to_le_bytes());
        page
    }

    #[test]
    fn doubling_is_that_of_the_field() {
        assert_eq!(doubled(0x8040_01ff_0000_0000), 0x1d80_02e3_0000_0000);
        // 2 generates all 255 elements but 0.
        let powers: std::collections::BTreeSet<u64> =
            std::iter::successors(Some(1), |power| Some(doubled(*power))).take(255).collect();
        assert_eq!(powers.len(), 255);
    }

    #[test]
    fn the_signature_of_a_sum_is_the_sum_of_signatures() {
        let (one, other) = (page(1), page(2));
        let mut both = one;
        both.iter_mut().zip(other).for_each(|(byte, other)| *byte ^= other);
        let sum: Vec<u8> =
            page_signature(&one).iter().zip(page_signature(&other)).map(|(a, b)| a ^ b).collect();
        assert_eq!(page_signature(&both)[..], sum);
        assert_eq!(page_signature(&[0; PAGE_SIZE]), [0; 8]);
    }

    #[test]
    fn a_change_within_eight_bytes_is_seen_wherever_it_is() {
        let whole = page(3);
        for at in 0..PAGE_SIZE - 8 {
            let mut changed = whole;
            let patch = page(at as u64 + 4);
            changed[at..at + 8].iter_mut().zip(patch).for_each(|(byte, patch)| *byte ^= patch | 1);
            assert_ne!(page_signature(&changed), page_signature(&whole), "byte {at}");
        }
    }
}
