//! Decides which pages of files leave the page cache.
//!
//! The kernel says which pages of a file are cached, but not when each was used. So the clock gives
//! all a second chance: a chunk of 2 MiB is *cooled* first, which means that its pages are dropped
//! from page tables, and written back if they are dirty. Some time later it is *dropped*. The kernel
//! keeps the pages that somebody has mapped again since, or has written, or pinned.
//!
//! This is pure: [`Cache`] is the kernel, or a model of it.

use std::collections::VecDeque;

/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = 2 << 20;

/// Bytes of a stride: it is looked at as a whole before its chunks are.
const STRIDE_BYTES: u64 = 1 << 30;

/// Most chunks that are cooled at a time.
pub const MAX_CHUNKS: usize = 64;

/// A file, by what orders it among all.
pub trait File: Copy + Ord {}

impl<T: Copy + Ord> File for T {}

/// Part of a file: up to [`CHUNK_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<F> {
    /// The file.
    pub file: F,
    /// First byte.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
}

/// The page cache of a set of files.
pub trait Cache {
    /// A file.
    type File: File;

    /// The next file after this one, or the first, and its size in bytes.
    fn next_file(&mut self, after: Option<Self::File>) -> Option<(Self::File, u64)>;

    /// Bytes of this part of a file that are cached; 0 if the file is gone.
    fn cached(&mut self, part: &Chunk<Self::File>) -> u64;

    /// Drops chunks from page tables, and begins to write back what is dirty.
    fn cool(&mut self, chunks: &[Chunk<Self::File>]);

    /// Whether pages of a chunk must be written back before they can be dropped.
    fn is_unwritten(&mut self, chunk: &Chunk<Self::File>) -> bool;

    /// Waits until what is dirty in a chunk now is written back.
    fn finish(&mut self, chunk: &Chunk<Self::File>);

    /// Drops the pages of a chunk that nobody uses, and that are written back.
    fn drop_unused(&mut self, chunk: &Chunk<Self::File>);
}

/// How a turn has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing had to go.
    Idle,
    /// Something went, or may go soon.
    Progress,
    /// Everything was tried, and is in use.
    Stuck,
}

/// The order in which pages leave.
#[derive(Debug)]
pub struct Clock<F> {
    /// Where the next chunk is looked for: file, its size, first byte.
    hand: Option<(F, u64, u64)>,
    /// Chunks that were cooled, the oldest first, and the bytes that they had.
    cooled: VecDeque<(Chunk<F>, u64)>,
    /// Bytes of all of them.
    cooled_bytes: u64,
    /// Bytes cooled since something could be dropped.
    in_vain: u64,
}

impl<F: File> Default for Clock<F> {
    fn default() -> Clock<F> {
        Clock { hand: None, cooled: VecDeque::new(), cooled_bytes: 0, in_vain: 0 }
    }
}

/// Bytes from which on chunks are cooled, and those from which on they are dropped.
fn marks(limit: u64) -> (u64, u64) {
    (limit - limit / 4, limit - limit / 8)
}

impl<F: File> Clock<F> {
    /// Has pages leave, if `resident` of `limit` bytes are cached.
    pub fn turn(&mut self, cache: &mut impl Cache<File = F>, resident: u64, limit: u64) -> Turn {
        let (low, high) = marks(limit);
        if resident <= low {
            self.in_vain = 0;
            return Turn::Idle;
        }
        self.cool(cache, resident - low + limit / 8);
        if resident <= high {
            return Turn::Progress;
        }
        let freed = self.drop(cache, resident - low);
        if freed > 0 {
            self.in_vain = 0;
        }
        match self.in_vain > 2 * resident || self.cooled.is_empty() && freed == 0 {
            true => Turn::Stuck,
            false => Turn::Progress,
        }
    }

    /// Drops cooled chunks until `wanted` bytes are free. Only the oldest is waited for. Returns the
    /// bytes that are free.
    fn drop(&mut self, cache: &mut impl Cache<File = F>, wanted: u64) -> u64 {
        let mut freed = 0;
        let mut unwritten = VecDeque::new();
        while freed < wanted
            && let Some((chunk, cooled)) = self.cooled.pop_front()
        {
            freed += drop_one(cache, &chunk);
            match cache.is_unwritten(&chunk) {
                true => unwritten.push_back((chunk, cooled)),
                false => self.cooled_bytes -= cooled,
            }
        }
        if freed < wanted
            && let Some((chunk, cooled)) = unwritten.pop_front()
        {
            self.cooled_bytes -= cooled;
            cache.finish(&chunk);
            freed += drop_one(cache, &chunk);
        }
        unwritten.append(&mut self.cooled);
        self.cooled = unwritten;
        freed
    }

    /// Cools chunks until `wanted` bytes are cool, or the hand has gone round.
    fn cool(&mut self, cache: &mut impl Cache<File = F>, wanted: u64) {
        let mut chunks = Vec::new();
        let mut first = None;
        while self.cooled_bytes < wanted
            && chunks.len() < MAX_CHUNKS
            && let Some((chunk, bytes)) = self.next(cache)
        {
            if *first.get_or_insert(chunk) == chunk && !chunks.is_empty() {
                break;
            }
            chunks.push(chunk);
            self.cooled.push_back((chunk, bytes));
            self.cooled_bytes += bytes;
            self.in_vain += bytes;
        }
        if !chunks.is_empty() {
            cache.cool(&chunks);
        }
    }

    /// The next chunk with cached pages, and their bytes. `None` if no file has any.
    fn next(&mut self, cache: &mut impl Cache<File = F>) -> Option<(Chunk<F>, u64)> {
        let mut rounds = 0;
        loop {
            let Some((file, size, at)) = self.hand else {
                rounds += 1;
                if rounds > 2 {
                    return None;
                }
                self.hand = cache.next_file(None).map(|(file, size)| (file, size, 0));
                continue;
            };
            if at >= size {
                self.hand = cache.next_file(Some(file)).map(|(file, size)| (file, size, 0));
                continue;
            }
            let part =
                |bytes: u64| Chunk { file, start: at, end: size.min((at / bytes + 1) * bytes) };
            let stride = part(STRIDE_BYTES);
            if at.is_multiple_of(STRIDE_BYTES) && cache.cached(&stride) == 0 {
                self.hand = Some((file, size, stride.end));
                continue;
            }
            let chunk = part(CHUNK_BYTES);
            self.hand = Some((file, size, chunk.end));
            let bytes = cache.cached(&chunk);
            if bytes > 0 {
                return Some((chunk, bytes));
            }
        }
    }
}

fn drop_one<C: Cache>(cache: &mut C, chunk: &Chunk<C::File>) -> u64 {
    let before = cache.cached(chunk);
    cache.drop_unused(chunk);
    before.saturating_sub(cache.cached(chunk))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const PAGE: u64 = 4096;
    const MIB: u64 = 1 << 20;

    #[derive(Clone, Copy, Default)]
    struct Page {
        is_mapped: bool,
        is_pinned: bool,
        is_dirty: bool,
    }

    /// Files by their numbers: size, and cached pages by their numbers.
    #[derive(Default)]
    struct Model {
        files: BTreeMap<u32, (u64, BTreeMap<u64, Page>)>,
        dropped: Vec<(u32, u64)>,
        finished: usize,
    }

    impl Model {
        fn touch(&mut self, file: u32, page: u64) {
            let file = self.files.get_mut(&file).expect("there");
            file.1.entry(page).or_default().is_mapped = true;
        }

        fn resident(&self) -> u64 {
            self.files.values().map(|file| file.1.len() as u64 * PAGE).sum()
        }
    }

    impl Cache for Model {
        type File = u32;

        fn next_file(&mut self, after: Option<u32>) -> Option<(u32, u64)> {
            let from = after.map_or(0, |file| file + 1);
            self.files.range(from..).next().map(|(file, (size, _))| (*file, *size))
        }

        fn cached(&mut self, part: &Chunk<u32>) -> u64 {
            let file = self.files.get(&part.file);
            let pages = part.start / PAGE..part.end.div_ceil(PAGE);
            file.map_or(0, |(_, cached)| cached.range(pages).count() as u64 * PAGE)
        }

        fn cool(&mut self, chunks: &[Chunk<u32>]) {
            for chunk in chunks {
                let Some((_, cached)) = self.files.get_mut(&chunk.file) else { continue };
                let pages = chunk.start / PAGE..chunk.end.div_ceil(PAGE);
                cached.range_mut(pages).for_each(|(_, page)| page.is_mapped = false);
            }
        }

        fn is_unwritten(&mut self, chunk: &Chunk<u32>) -> bool {
            let pages = chunk.start / PAGE..chunk.end.div_ceil(PAGE);
            let file = self.files.get(&chunk.file);
            file.is_some_and(|(_, cached)| cached.range(pages).any(|(_, page)| page.is_dirty))
        }

        fn finish(&mut self, chunk: &Chunk<u32>) {
            self.finished += 1;
            let Some((_, cached)) = self.files.get_mut(&chunk.file) else { return };
            let pages = chunk.start / PAGE..chunk.end.div_ceil(PAGE);
            cached.range_mut(pages).for_each(|(_, page)| page.is_dirty = false);
        }

        fn drop_unused(&mut self, chunk: &Chunk<u32>) {
            let Some((_, cached)) = self.files.get_mut(&chunk.file) else { return };
            let pages = chunk.start / PAGE..chunk.end.div_ceil(PAGE);
            let unused: Vec<u64> = cached
                .range(pages)
                .filter(|(_, page)| !page.is_mapped && !page.is_pinned && !page.is_dirty)
                .map(|(page, _)| *page)
                .collect();
            for page in unused {
                cached.remove(&page);
                self.dropped.push((chunk.file, page));
            }
        }
    }

    fn model(files: &[(u32, u64)]) -> Model {
        let files = files.iter().map(|&(file, size)| (file, (size, BTreeMap::new()))).collect();
        Model { files, ..Model::default() }
    }

    fn turn(clock: &mut Clock<u32>, model: &mut Model, limit: u64) -> Turn {
        let resident = model.resident();
        clock.turn(model, resident, limit)
    }

    #[test]
    fn what_is_used_again_and_again_stays() {
        let mut model = model(&[(1, 8 * MIB), (2, 64 * MIB)]);
        let mut clock = Clock::default();
        let limit = 24 * MIB;
        for page in 0..64 * MIB / PAGE {
            model.touch(2, page);
            if page % 64 == 0 {
                (0..8 * MIB / PAGE).for_each(|hot| model.touch(1, hot));
            }
            turn(&mut clock, &mut model, limit);
            assert!(model.resident() <= limit, "{} at page {page}", model.resident());
        }
        let hot = model.dropped.iter().filter(|(file, _)| *file == 1).count();
        assert!(hot * 20 < model.dropped.len(), "{hot} of {} were hot", model.dropped.len());
    }

    #[test]
    fn clean_pages_go_before_any_write_is_waited_for() {
        let mut model = model(&[(1, 16 * MIB), (2, 16 * MIB)]);
        for page in 0..16 * MIB / PAGE {
            model.touch(1, page);
            model.touch(2, page);
        }
        let dirty = model.files.get_mut(&2).expect("there");
        dirty.1.values_mut().for_each(|page| page.is_dirty = true);
        let mut clock = Clock::default();
        turn(&mut clock, &mut model, 24 * MIB);
        assert!(model.finished == 0 && model.dropped.iter().all(|(file, _)| *file == 1));
        for _ in 0..8 {
            turn(&mut clock, &mut model, 8 * MIB);
        }
        assert!(model.finished > 0 && model.resident() <= 8 * MIB, "{}", model.resident());
    }

    #[test]
    fn pinned_pages_are_tried_and_then_left_alone() {
        let mut model = model(&[(7, 16 * MIB)]);
        (0..16 * MIB / PAGE).for_each(|page| model.touch(7, page));
        let file = model.files.get_mut(&7).expect("there");
        file.1.values_mut().for_each(|page| page.is_pinned = true);
        let mut clock = Clock::default();
        let turns = (0..64).map(|_| clock.turn(&mut model, 16 * MIB, 8 * MIB));
        assert!(turns.last() == Some(Turn::Stuck));
        assert_eq!(model.resident(), 16 * MIB);
        model.files.get_mut(&7).expect("there").1.values_mut().for_each(|p| p.is_pinned = false);
        for _ in 0..8 {
            turn(&mut clock, &mut model, 8 * MIB);
        }
        assert!(model.resident() <= 8 * MIB);
        assert_eq!(clock.turn(&mut model, 0, 8 * MIB), Turn::Idle);
    }

    #[test]
    fn sparse_files_and_files_that_go_cost_little() {
        let mut model = model(&[(1, 1 << 40), (2, PAGE + 1), (3, 0)]);
        (0..4096).for_each(|page| model.touch(1, page * 65_536));
        model.touch(2, 1);
        let mut clock = Clock::default();
        turn(&mut clock, &mut model, 4 * MIB);
        model.files.remove(&1);
        for _ in 0..80 {
            clock.turn(&mut model, 16 * MIB, 4 * MIB);
        }
        assert_eq!(model.resident(), 0);
        assert_eq!(clock.turn(&mut model, 16 * MIB, 4 * MIB), Turn::Stuck);
    }
}
