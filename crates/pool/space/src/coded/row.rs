//! Checks whether the pages of a coded stripe still belong together.
//!
//! A coded segment has one extent, so no copy exists to compare it with. It is compared with the
//! code instead. Pages with the same number in the shards of a stripe are a *row*: the parities'
//! pages follow from those of the segments. Decisions only, as in [`scrub`](crate::scrub):
//!
//! - Donors are asked for the states of a run of pages, and for their signatures, on which the code
//!   can be computed ([`hecaton_memory::page_signature`]); no page moves. [`wrong_rows`] says in
//!   which rows a page does not match the sum that its donor keeps, or the one that its owner
//!   knows, or the signatures do not agree with the code.
//! - The pages of such a row are read, and [`settle`] finds what they must have been: the row of
//!   the code that agrees with all that the owner knows, and with as many of the pages as any does.
//!   Pages that differ from it are written again, where they are.
//!
//! No write reaches a stripe while it is coded, so no write makes an answer out of date. Before a
//! page is written again, the caller makes sure that the stripe stays coded meanwhile
//! ([`Map::is_still`]).

use crate::coded::code::{self, Code, Coder};
use crate::coded::stripe::State;
use crate::copies::scrub::Known;
use crate::map::Map;
use crate::map::group::Place;
use hecaton_memory::{Generation, PageSignature, PageSum, ZERO_PAGE_SUM, page_sum};
use hecaton_transport::protocol::PageState;

/// How far a round has come. Stripes that are warming have copies soon, and are compared when they
/// are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    stripe: u64,
    first: u32,
}

impl Cursor {
    /// The next rows to inspect, so many at most. `None` at the end of a round; the next one begins
    /// after that.
    ///
    /// Stripes with a shard that cannot be asked for are passed over: they are to be mended
    /// otherwise first.
    pub fn next(&mut self, map: &Map, most: u32) -> Option<Rows> {
        loop {
            let Some(stripe) = map.coded().find(|stripe| *stripe >= self.stripe) else {
                *self = Cursor::default();
                return None;
            };
            if stripe != self.stripe {
                *self = Cursor { stripe, first: 0 };
            }
            let Some(rows) = map.rows(stripe, self.first, most) else {
                *self = Cursor { stripe: stripe + 1, first: 0 };
                continue;
            };
            self.first += rows.count;
            return Some(rows);
        }
    }
}

/// Some rows of a coded stripe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The stripe.
    pub stripe: u64,
    /// That of its shards.
    pub generation: Generation,
    /// The first page, in each segment.
    pub first: u32,
    /// How many pages of each.
    pub count: u32,
    /// The shards in order: their numbers, and where they are. One that is nowhere is zeros.
    pub shards: Vec<(u64, Option<Place>)>,
}

impl Map {
    /// So many rows of a stripe from one on, at most. None, if there are none, if the stripe is not
    /// coded, or if not all of its shards are there.
    pub fn rows(&self, stripe: u64, first: u32, most: u32) -> Option<Rows> {
        let all = self.all_rows(stripe)?;
        let count = all.count.saturating_sub(first).min(most);
        (count > 0).then_some(Rows { first, count, ..all })
    }

    /// Whether the stripe has been coded all the time since these rows were named, in the same
    /// places.
    pub fn is_still(&self, rows: &Rows) -> bool {
        self.all_rows(rows.stripe)
            .is_some_and(|all| all.generation == rows.generation && all.shards == rows.shards)
    }

    /// The stripe that a segment is part of, if it is coded and all its shards are there.
    pub fn coded_stripe_of(&self, segment: u64) -> Option<u64> {
        let (stripe, _) = self.code()?.shard_of(segment);
        self.all_rows(stripe).map(|_| stripe)
    }

    fn all_rows(&self, stripe: u64) -> Option<Rows> {
        let code = self.code()?;
        let known = self.stripes.get(&stripe).filter(|known| known.state != State::Coding)?;
        let mut shards = Vec::with_capacity(code.shards());
        for segment in code.shards_of(stripe) {
            if !code::is_parity(segment) && !self.segments.contains_key(&segment) {
                shards.push((segment, None));
                continue;
            }
            let group = self.holding(segment)?.group;
            let place = group.whole().find(|place| self.donor(place.donor).reachable)?;
            shards.push((segment, Some(place)));
        }
        let (first, count) = (0, self.segment_pages() as u32);
        Some(Rows { stripe, generation: known.generation, first, count, shards })
    }
}

/// Answer of one shard's donor about its pages.
#[derive(Clone, Debug)]
pub struct Said {
    /// State of each page.
    pub states: Vec<PageState>,
    /// Signature of each page as it is. If any shard has none, signatures are not compared.
    pub signatures: Vec<PageSignature>,
}

impl Said {
    /// Answer for `pages` pages of zeros.
    pub fn nothing(pages: u32) -> Said {
        let pages = pages as usize;
        Said { states: vec![PageState::Unwritten; pages], signatures: vec![[0; 8]; pages] }
    }
}

/// The rows, by their page, that have something wrong in them. `said` is in the order of the
/// shards.
///
/// `known` is asked for segments' pages: the sum of what is stored, if that is certain.
pub fn wrong_rows(
    code: Code,
    rows: &Rows,
    said: &[Said],
    segment_pages: u64,
    known: Known<'_>,
) -> Vec<u32> {
    let mut wrong = vec![false; rows.count as usize];
    for ((segment, _), said) in rows.shards.iter().zip(said) {
        for (at, state) in said.states.iter().enumerate() {
            let found = match *state {
                PageState::Unwritten => ZERO_PAGE_SUM,
                PageState::Sound(sum) => sum,
                PageState::Damaged(_) => {
                    wrong[at] = true;
                    continue;
                }
            };
            if !code::is_parity(*segment) {
                let page = segment * segment_pages + u64::from(rows.first) + at as u64;
                wrong[at] |= known(page).is_some_and(|known| known != found);
            }
        }
    }
    if said.iter().any(|said| said.signatures.len() != wrong.len()) {
        return of_rows(rows, &wrong);
    }
    let all = said.iter().map(|said| said.signatures.as_flattened().to_vec());
    let all: Vec<Vec<u8>> = all.collect();
    let mut coded: Vec<Option<Vec<u8>>> =
        all.iter().enumerate().map(|(at, all)| (at < code.data()).then(|| all.clone())).collect();
    let parities: Vec<usize> = (code.data()..code.shards()).collect();
    if code.coder().complete(&mut coded, &parities) {
        for (expected, found) in coded.iter().flatten().zip(&all).skip(code.data()) {
            let lines = expected.chunks(size_of::<PageSignature>());
            for (at, line) in lines.zip(found.chunks(size_of::<PageSignature>())).enumerate() {
                wrong[at] |= line.0 != line.1;
            }
        }
    }
    of_rows(rows, &wrong)
}

fn of_rows(rows: &Rows, wrong: &[bool]) -> Vec<u32> {
    let pages = (rows.first..).zip(wrong).filter(|(_, is_wrong)| **is_wrong);
    pages.map(|(page, _)| page).collect()
}

/// A page of a row, as it was read.
#[derive(Clone, Debug)]
pub struct RowPage {
    /// Its contents.
    pub data: Vec<u8>,
    /// The sum that came with it.
    pub sum: PageSum,
    /// Its sum, as far as the owner knows it.
    pub known: Option<PageSum>,
}

impl RowPage {
    /// Whether nothing speaks against it.
    fn may_be_right(&self) -> bool {
        page_sum(&self.data) == self.sum && self.known.is_none_or(|known| known == self.sum)
    }
}

/// Finds the right pages of a row, in the order of the shards. None if no row of the code has
/// enough of these pages and agrees with every known sum.
pub fn settle(code: Code, coder: &Coder, pages: &[RowPage]) -> Option<Vec<Vec<u8>>> {
    let candidates: Vec<usize> = (0..pages.len()).filter(|at| pages[*at].may_be_right()).collect();
    let mut best: Option<(usize, Vec<Vec<u8>>)> = None;
    // 495 choices at most, of twelve shards; the first one is nearly always it.
    for chosen in choices(&candidates, code.data()) {
        let mut row: Vec<Option<Vec<u8>>> = vec![None; pages.len()];
        chosen.iter().for_each(|at| row[*at] = Some(pages[*at].data.clone()));
        let all: Vec<usize> = (0..pages.len()).collect();
        if !coder.complete(&mut row, &all) {
            continue;
        }
        let row: Vec<Vec<u8>> = row.into_iter().flatten().collect();
        let is_known = |(page, data): (&RowPage, &Vec<u8>)| {
            page.known.is_none_or(|known| known == page_sum(data))
        };
        if !pages.iter().zip(&row).all(is_known) {
            continue;
        }
        let agreeing = candidates.iter().filter(|at| pages[**at].data == row[**at]).count();
        let is_better = best.as_ref().is_none_or(|(most, _)| agreeing > *most);
        if is_better {
            best = Some((agreeing, row));
        }
        if agreeing == candidates.len() {
            break;
        }
    }
    best.map(|(_, row)| row)
}

/// All ways to choose so many of them, those with the first ones first.
fn choices(from: &[usize], count: usize) -> Vec<Vec<usize>> {
    match (count, from) {
        (0, _) => vec![Vec::new()],
        (_, []) => Vec::new(),
        (_, [first, rest @ ..]) => {
            let with = choices(rest, count - 1).into_iter().map(|mut chosen| {
                chosen.insert(0, *first);
                chosen
            });
            with.chain(choices(rest, count)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::group::DonorIndex;
    use hecaton_memory::{ExtentId, PAGE_SIZE, SplitMix, page_signature};
    use proptest::prelude::*;

    const SEGMENT_PAGES: u64 = 8;

    fn page(seed: u64) -> Vec<u8> {
        let mut mix = SplitMix::new(seed);
        (0..PAGE_SIZE / 8).flat_map(|_| mix.draw().to_le_bytes()).collect()
    }

    /// A row of the code, with zeros in one segment.
    fn row(code: Code, seed: u64) -> Vec<Vec<u8>> {
        let data = |at: usize| match at {
            1 => vec![0; PAGE_SIZE],
            _ => page(seed * 16 + at as u64),
        };
        let mut row: Vec<Option<Vec<u8>>> =
            (0..code.shards()).map(|at| (at < code.data()).then(|| data(at))).collect();
        let parities: Vec<usize> = (code.data()..code.shards()).collect();
        assert!(code.coder().complete(&mut row, &parities));
        row.into_iter().flatten().collect()
    }

    /// As donors have it, with what its owner knows of the segments' pages.
    fn stored(code: Code, row: &[Vec<u8>]) -> Vec<RowPage> {
        let pages = row.iter().enumerate().map(|(at, data)| {
            let sum = page_sum(data);
            RowPage { data: data.clone(), sum, known: (at < code.data()).then_some(sum) }
        });
        pages.collect()
    }

    /// How a page may go bad.
    #[derive(Clone, Copy, Debug)]
    enum Harm {
        /// Without its sum.
        Damaged,
        /// Together with its sum.
        Altered,
    }

    fn harm(page: &mut RowPage, how: Harm, seed: u64) {
        page.data[seed as usize % PAGE_SIZE] ^= 1 + (seed % 255) as u8;
        if matches!(how, Harm::Altered) {
            page.sum = page_sum(&page.data);
        }
    }

    fn harm_of() -> impl Strategy<Value = Harm> {
        prop_oneof![Just(Harm::Damaged), Just(Harm::Altered)]
    }

    #[test]
    fn all_choices_are_made_once() {
        assert_eq!(choices(&[1, 2, 3], 2), [[1, 2], [1, 3], [2, 3]]);
        assert_eq!(choices(&[1, 2], 3), Vec::<Vec<usize>>::new());
        assert_eq!(choices(&(0..12).collect::<Vec<_>>(), 8).len(), 495);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// As many pages as there are parities may go bad, whether their sums tell or not. If more
        /// go bad, no page is invented.
        #[test]
        fn a_row_is_what_it_was(
            (data, parity) in (2u8..=5, 1u8..=3),
            seed in 0..1000u64,
            harms in prop::collection::vec((any::<prop::sample::Index>(), harm_of()), 0..5),
        ) {
            let code = Code::new(data, parity).unwrap();
            let (whole, coder) = (row(code, seed), code.coder());
            let mut pages = stored(code, &whole);
            let mut bad = std::collections::BTreeSet::new();
            for (at, how) in harms {
                let at = at.index(pages.len());
                if bad.insert(at) {
                    harm(&mut pages[at], how, seed + at as u64);
                }
            }
            let settled = settle(code, &coder, &pages);
            if bad.len() <= code.parity() {
                prop_assert_eq!(settled.as_ref(), Some(&whole));
            }
            // No known page is ever replaced by another.
            for (was, is) in whole.iter().zip(settled.iter().flatten()).take(code.data()) {
                prop_assert_eq!(was, is);
            }
        }

        /// A page that nobody names any more goes bad with its sum: the others tell, if there are
        /// enough; and if there are not, the parity follows it.
        #[test]
        fn of_what_nobody_knows_the_most_agree(parity in 1u8..=3, seed in 0..1000u64, at in 0..4usize) {
            let code = Code::new(4, parity).unwrap();
            let whole = row(code, seed);
            let mut pages = stored(code, &whole);
            pages[at].known = None;
            harm(&mut pages[at], Harm::Altered, seed);
            let settled = settle(code, &code.coder(), &pages).unwrap();
            if parity > 1 {
                prop_assert_eq!(&settled, &whole);
            }
            for other in (0..4).filter(|other| *other != at) {
                prop_assert_eq!(&settled[other], &whole[other]);
            }
        }
    }

    #[test]
    fn rows_with_something_wrong_are_found_without_their_pages() {
        let code: Code = "4+2".parse().unwrap();
        let table: Vec<Vec<RowPage>> =
            (0..SEGMENT_PAGES).map(|seed| stored(code, &row(code, seed))).collect();
        let place = |at| Place { donor: DonorIndex(at), boot: 1, extent: ExtentId(1) };
        let segments = code.shards_of(3).zip(0..);
        let rows = Rows {
            stripe: 3,
            generation: Generation(7),
            first: 0,
            count: SEGMENT_PAGES as u32,
            shards: segments.map(|(segment, at)| (segment, Some(place(at)))).collect(),
        };
        let known_of = |table: &[Vec<RowPage>], page: u64| {
            let (segment, at) = (page / SEGMENT_PAGES, page % SEGMENT_PAGES);
            table[at as usize][code.shard_of(segment).1].known
        };
        let said = |table: &[Vec<RowPage>]| -> Vec<Said> {
            let of = |shard: usize| Said {
                states: table.iter().map(|row| state(&row[shard])).collect(),
                signatures: table.iter().map(|row| signature(&row[shard])).collect(),
            };
            (0..code.shards()).map(of).collect()
        };
        let wrong = |table: &[Vec<RowPage>]| {
            let known = |page| known_of(table, page);
            wrong_rows(code, &rows, &said(table), SEGMENT_PAGES, &known)
        };
        assert_eq!(wrong(&table), [] as [u32; 0]);
        for shard in 0..code.shards() {
            for how in [Harm::Damaged, Harm::Altered] {
                for is_known in [true, false] {
                    let mut table = table.clone();
                    harm(&mut table[5][shard], how, 77);
                    if !is_known {
                        table[5][shard].known = None;
                    }
                    assert_eq!(wrong(&table), [5], "shard {shard}, {how:?}");
                }
            }
        }
    }

    fn state(page: &RowPage) -> PageState {
        match page_sum(&page.data) == page.sum {
            true => PageState::Sound(page.sum),
            false => PageState::Damaged(page.sum),
        }
    }

    fn signature(page: &RowPage) -> PageSignature {
        page_signature(page.data.as_slice().try_into().unwrap())
    }
}
