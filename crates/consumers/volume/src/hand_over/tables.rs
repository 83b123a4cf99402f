//! Sends and receives a volume's tables. Each segment that holds data comes with its generation,
//! its pages' words and, if the volume is encrypted, their seals. Slots are not sent: the owner
//! finishes all requests in flight before.

use super::HandOverError;
use crate::state::{SEGMENT_PAGES, State};
use hecaton_memory::{PAGE_SIZE, page_sum};
use std::io::{Read, Write};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

const WORDS_BYTES: usize = SEGMENT_PAGES as usize * size_of::<u32>();
const NUMBERS_BYTES: usize = 16;

/// The segments that hold anything.
pub(crate) fn segments(state: &State) -> Vec<u64> {
    let all = 0..state.pages().div_ceil(SEGMENT_PAGES);
    all.filter(|segment| state.is_begun(*segment)).collect()
}

pub(crate) fn send(
    state: &State,
    segments: &[u64],
    encrypted: bool,
    to: &mut impl Write,
) -> Result<(), HandOverError> {
    if encrypted {
        let mut record = Vec::new();
        append(&mut record, state.key_words());
        send_record(&record, to)?;
    }
    for &segment in segments {
        let mut record = segment.to_le_bytes().to_vec();
        record.extend_from_slice(&state.generation(segment).load(Acquire).to_le_bytes());
        let first = segment * SEGMENT_PAGES;
        for page in first..first + SEGMENT_PAGES {
            record.extend_from_slice(&state.word(page).load(Acquire).to_le_bytes());
        }
        if encrypted {
            append(&mut record, state.seal_words(segment));
        }
        send_record(&record, to)?;
    }
    Ok(to.flush()?)
}

pub(crate) fn receive(
    state: &State,
    segments: u64,
    encrypted: bool,
    from: &mut impl Read,
) -> Result<(), HandOverError> {
    if encrypted {
        let keys = state.key_words();
        fill(keys, &receive_record(size_of_val(keys), from)?);
    }
    let most = state.pages().div_ceil(SEGMENT_PAGES);
    if segments > most {
        return Err(HandOverError::Foreign(format!("{segments} segments of {most}")));
    }
    let seals = if encrypted { size_of_val(state.seal_words(0)) } else { 0 };
    for _ in 0..segments {
        let record = receive_record(NUMBERS_BYTES + WORDS_BYTES + seals, from)?;
        let number = |at| u64::from_le_bytes(record[at..at + 8].try_into().expect("eight bytes"));
        let segment = number(0);
        if segment >= most {
            return Err(HandOverError::Foreign(format!("segment {segment} of {most}")));
        }
        let (words, seals) = record[NUMBERS_BYTES..].split_at(WORDS_BYTES);
        state.generation(segment).store(number(8), Release);
        for (page, word) in (segment * SEGMENT_PAGES..).zip(words.as_chunks().0) {
            state.word(page).store(u32::from_le_bytes(*word), Release);
        }
        if encrypted {
            fill(state.seal_words(segment), seals);
        }
    }
    Ok(())
}

fn append(record: &mut Vec<u8>, words: &[AtomicU64]) {
    words.iter().for_each(|word| record.extend_from_slice(&word.load(Acquire).to_le_bytes()));
}

fn fill(words: &[AtomicU64], bytes: &[u8]) {
    for (word, bytes) in words.iter().zip(bytes.as_chunks().0) {
        word.store(u64::from_le_bytes(*bytes), Release);
    }
}

fn send_record(record: &[u8], to: &mut impl Write) -> Result<(), HandOverError> {
    to.write_all(record)?;
    Ok(to.write_all(&sum_of(record).to_le_bytes())?)
}

/// Made of those of its pages, the last of which is filled up with zeros. Each counts by its place.
fn sum_of(record: &[u8]) -> u32 {
    let mut page = [0; PAGE_SIZE];
    record.chunks(PAGE_SIZE).fold(0, |sum: u32, chunk| {
        page[..chunk.len()].copy_from_slice(chunk);
        page[chunk.len()..].fill(0);
        sum.rotate_left(1) ^ page_sum(&page)
    })
}

fn receive_record(bytes: usize, from: &mut impl Read) -> Result<Vec<u8>, HandOverError> {
    let (mut record, mut sum) = (vec![0; bytes], [0; 4]);
    from.read_exact(&mut record)?;
    from.read_exact(&mut sum)?;
    match sum_of(&record) == u32::from_le_bytes(sum) {
        true => Ok(record),
        false => Err(HandOverError::Foreign("a checksum is wrong".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Page;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn what_arrives_is_what_was_sent(
            pages in prop::collection::btree_map(0u64..3 * SEGMENT_PAGES, 1u32..u32::MAX, 0..50),
            encrypted in any::<bool>(),
            cut in 0usize..100_000,
        ) {
            let state = State::create(3 * SEGMENT_PAGES - 7).unwrap();
            for (&page, &word) in &pages {
                state.begun(page / SEGMENT_PAGES);
                state.set_page(page, Page::Data(word));
                state.seal_words(page / SEGMENT_PAGES)[page as usize % 7].store(page, Release);
            }
            state.key_words()[0].store(77, Release);
            let (mut wire, begun) = (Vec::new(), segments(&state));
            send(&state, &begun, encrypted, &mut wire).unwrap();
            let there = State::create(3 * SEGMENT_PAGES - 7).unwrap();
            receive(&there, begun.len() as u64, encrypted, &mut wire.as_slice()).unwrap();
            for page in 0..3 * SEGMENT_PAGES {
                prop_assert_eq!(there.page(page), state.page(page));
            }
            let words = |state: &State| {
                let seals = (0..3).flat_map(|segment| state.seal_words(segment));
                let all = state.key_words().iter().chain(seals).map(|word| word.load(Acquire));
                all.collect::<Vec<_>>()
            };
            prop_assert_eq!(words(&there) == words(&state), encrypted);
            prop_assert_eq!(segments(&there), begun.clone());
            if cut < wire.len() {
                let receive = |wire: &[u8]| {
                    let there = State::create(3 * SEGMENT_PAGES - 7).unwrap();
                    receive(&there, begun.len() as u64, encrypted, &mut { wire })
                };
                prop_assert!(receive(&wire[..cut]).is_err());
                wire[cut] ^= 1;
                prop_assert!(receive(&wire).is_err());
            }
        }
    }
}
