//! Which pages to fetch before they are asked for.
//!
//! Leap (Al Maruf & Chowdhury, "Effectively Prefetching Remote Memory with Leap", USENIX ATC 2020)
//! with two changes. Leap keeps one history per process, in which interleaved streams are each
//! other's noise. Here the faults of each thread are first told apart into up to
//! [`STREAMS_PER_THREAD`] streams, by nearness; each has its own majority vote. Leap learns from a
//! hit in the swap cache that a prefetched page was of use. Here nearly all prefetched pages are
//! mapped at once and never fault. So each window has one *trigger* page, about its middle, that is
//! fetched but left unmapped. Its cheap fault shows that the program follows the stream. The next
//! window is fetched while the program walks the rest.
//!
//! # Protocol
//!
//! One [`Prefetcher`] serves any number of address spaces, as long as page keys and thread ids tell
//! them apart and keys of one space are numbered as its pages are.
//!
//! * A fault on a missing page (in the pool, or in staging but not a trigger) →
//!   [`Prefetcher::on_fault`]. The pager fetches the page itself, and the returned window with it.
//! * Of the window, pages that are resident, in flight, or not the program's are left out. All
//!   others are mapped, except the trigger, which goes to staging marked as such. If that page was
//!   among those left out, any other of the window may take its place. The outcome is told by
//!   [`Prefetcher::on_window_issued`].
//! * A fault on a trigger (in staging, or still on its way there) →
//!   [`Prefetcher::on_trigger_hit`]; the returned window is the next.
//! * A trigger pushed out of staging unused, or unmapped → [`Prefetcher::on_window_dead`].
//!
//! # How deep
//!
//! A stream's first window is small; each trigger hit doubles it, up to the limit; each dead window
//! quarters it. A thread's windows together earn it a standing. With a poor standing a trend must
//! be longer to count. Below that, only one trend in [`PROBE_INTERVAL`] is tried. So random access
//! costs a few pages every some thousand faults, and a sequential phase is noticed within a few
//! dozen.
//!
//! A call looks at one thread's streams and one stream's history; memory is allocated only when a
//! thread is first seen.

mod fill_ahead;
mod trend;

pub use fill_ahead::FillAhead;

use serde::Serialize;
use trend::History;

/// Streams told apart in one thread. A 16-way merge has 16 inputs and an output.
pub const STREAMS_PER_THREAD: usize = 20;

/// Threads remembered; the one longest without a fault gives way.
pub const MAX_THREADS: usize = 64;

/// A thread in bad standing has one of this many trends tried.
pub const PROBE_INTERVAL: u32 = 32;

/// The most pages in a window.
pub const MAX_WINDOW_PAGES: u32 = 256;

/// A fault this near to a stream's last page belongs to it; further, only if it is just where the
/// stream's last delta points to.
const STREAM_RADIUS_PAGES: u64 = 64;

/// The longest stride: 64 MiB.
const MAX_STRIDE_PAGES: u64 = 1 << 14;

/// Long strides of up to this many streams in turn are told apart.
const MAX_INTERLEAVED_STRIDES: usize = 8;

/// Deltas that must be the same for a long stride.
const STRIDE_RUN: usize = 3;

/// Faults of a thread remembered for that.
const RECENT_FAULTS: usize = 32;

/// The first window of a stream, by standing.
const FIRST_WINDOW: u32 = 8;
const FIRST_WINDOW_IN_DOUBT: u32 = 4;
const PROBE_WINDOW: u32 = 2;

/// Standing: 0..=255. From GOOD on, two neighbouring pages in a row are a trend; below BAD trends
/// are only probed.
const INITIAL_STANDING: u32 = 160;
const GOOD_STANDING: u32 = 128;
const BAD_STANDING: u32 = 48;

/// Pages to fetch ahead: `start`, `start + stride`, … (`count` of them). None lies below zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// The first page.
    pub start: u64,
    /// Pages from each to the next; never 0.
    pub stride: i64,
    /// How many pages; at least 1.
    pub count: u32,
    /// Which of them is the trigger, `0..count`.
    pub trigger: u32,
}

impl Window {
    /// Page number `index` of the window.
    pub fn page(&self, index: u32) -> u64 {
        debug_assert!(index < self.count);
        self.start.wrapping_add_signed(self.stride * i64::from(index))
    }

    /// The page that is fetched, but left unmapped.
    pub fn trigger_page(&self) -> u64 {
        self.page(self.trigger)
    }

    /// All pages, in the order in which the program is expected to come to them.
    pub fn pages(&self) -> impl Iterator<Item = u64> + use<> {
        let window = *self;
        (0..window.count).map(move |index| window.page(index))
    }
}

/// Outcome of prefetching, in pages unless said otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Counters {
    /// Fetched ahead.
    pub prefetched: u64,
    /// Prefetched pages that were used: the trigger behind them was hit.
    pub hits: u64,
    /// Prefetched pages taken to be unused: their trigger was never hit. The others are still open.
    pub waste: u64,
    /// Windows issued.
    pub windows: u64,
    /// Trends not followed because of the thread's bad standing.
    pub suppressed: u64,
}

/// Room for what is fetched ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The most pages in one window, `0..=`[`MAX_WINDOW_PAGES`]; 0 turns prefetching off.
    pub window_pages: u32,
    /// The most pages in all windows whose trigger is still out.
    pub ahead_pages: u32,
}

impl Limits {
    /// For a local memory of `capacity_pages`: all windows within a sixteenth of it, each within
    /// a 128th. The default eviction order keeps pages that were fetched ahead, and are not
    /// used yet, for as long as it takes a twelfth of memory to be replaced; more than that ahead
    /// would be evicted before its use.
    pub fn for_capacity(capacity_pages: usize) -> Self {
        let part = |share: usize, most: u32| (capacity_pages / share).min(most as usize) as u32;
        Self { window_pages: part(128, MAX_WINDOW_PAGES), ahead_pages: part(16, 1 << 20) }
    }
}

/// A window whose trigger is out.
#[derive(Clone, Copy)]
struct Open {
    stride: i64,
    /// The page after the window's last, and how many pages of the window were really fetched.
    next: u64,
    planned: u32,
    fetched: u32,
    trigger: u64,
}

#[derive(Clone, Copy)]
struct Stream {
    /// The page at which the stream was seen last.
    last: u64,
    /// The end of a window of which nothing was left out to wait for, else the same as `last`. If
    /// the window was empty because its pages are resident, the next fault comes behind it; if
    /// because there was no room, right behind `last`.
    resident_to: u64,
    history: History,
    /// Size of the next window; 0 until there has been one.
    depth: u32,
    open: Option<Open>,
    /// Fetched pages behind the last hit trigger, whose use the next trigger will prove.
    tail: u32,
    used_at: u64,
}

struct Thread {
    id: u64,
    used_at: u64,
    standing: u32,
    /// Trends left out since the last probe.
    unprobed: u32,
    recent: Recent,
    streams: [Option<Stream>; STREAMS_PER_THREAD],
}

/// Finds streams in one address space's faults. See the [module](self) for the protocol.
pub struct Prefetcher {
    limits: Limits,
    threads: Vec<Thread>,
    /// Planned pages of all open windows.
    ahead: u32,
    /// The thread whose window was opened last: the one that is issued next.
    opened_last: usize,
    /// Counts calls: the time of the LRU choices.
    now: u64,
    counters: Counters,
}

impl Prefetcher {
    /// Nothing seen yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            threads: Vec::new(),
            ahead: 0,
            opened_last: 0,
            now: 0,
            counters: Counters::default(),
        }
    }

    /// Changes the limits for windows from now on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Hits and waste so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Pages of the windows whose trigger is still out.
    pub fn ahead_pages(&self) -> u32 {
        self.ahead
    }

    /// `thread` faulted on `page`, which was missing and was not a trigger.
    pub fn on_fault(&mut self, thread: u64, page: u64) -> Option<Window> {
        self.now += 1;
        let now = self.now;
        let thread = self.thread_index(thread);
        self.threads[thread].recent.push(page);
        let Some(at) = self.threads[thread].nearest_stream(page) else {
            let at = self.begin_stream(thread, page);
            let stride = self.threads[thread].recent.long_stride()?;
            return self.open_first_window(thread, at, page, stride);
        };
        let stream = self.stream(thread, at);
        stream.used_at = now;
        if let Some(open) = stream.open {
            if !open.is_past_end(page) {
                // A page of the window went before it was used, or had not arrived yet.
                return None;
            }
            // The program went past the window without touching its trigger, as it may where some
            // pages were resident. It still follows the stream.
            let depth = stream.depth;
            self.close_window(thread, at);
            return self.open_window(thread, at, page, page, open.stride, depth);
        }
        let delta = page.wrapping_sub(stream.last) as i64;
        if delta == 0 {
            return None;
        }
        stream.last = page;
        stream.resident_to = page;
        stream.history.push(delta as i32);
        let history = stream.history;
        let standing = self.threads[thread].standing;
        let stride = history.majority().or(history.drift()).or_else(|| {
            (standing >= GOOD_STANDING && history.len() == 1)
                .then(|| history.newest())
                .flatten()
                .filter(|delta| delta.abs() == 1)
        })?;
        self.open_first_window(thread, at, page, i64::from(stride))
    }

    /// `thread` faulted on a trigger page in staging: the stream goes on.
    pub fn on_trigger_hit(&mut self, thread: u64, page: u64) -> Option<Window> {
        self.now += 1;
        let now = self.now;
        let own = self.thread_index(thread);
        let Some((thread, at)) = self.find_trigger(own, page) else {
            // Its stream has given way to others meanwhile.
            return self.on_fault(thread, page);
        };
        let stream = self.stream(thread, at);
        stream.used_at = now;
        let (open, tail, depth) = (stream.open?, stream.tail, stream.depth);
        self.close_window(thread, at);
        let past_trigger = open.fetched / 2;
        self.stream(thread, at).tail = past_trigger;
        self.counters.hits += u64::from(tail + open.fetched - past_trigger);
        let standing = &mut self.threads[thread].standing;
        *standing += (255 - *standing).div_ceil(8);
        let before_next = open.next.wrapping_add_signed(-open.stride);
        self.open_window(thread, at, page, before_next, open.stride, depth.saturating_mul(2))
    }

    /// The pager fetched only `fetched` pages of `window`, and put `trigger` in staging as its
    /// trigger; `None` if no page was left to be one, which ends the window. Need not be
    /// called if the whole window was fetched with the trigger as planned.
    pub fn on_window_issued(&mut self, window: &Window, fetched: u32, trigger: Option<u64>) {
        let planned = window.trigger_page();
        let Some((thread, at)) = self.find_trigger(self.opened_last, planned) else { return };
        let fetched = fetched.min(window.count);
        self.counters.prefetched -= u64::from(window.count - fetched);
        match trigger {
            Some(trigger) => {
                if let Some(open) = &mut self.stream(thread, at).open {
                    open.fetched = fetched;
                    open.trigger = trigger;
                }
            }
            None => {
                let end = window.page(window.count - 1);
                self.close_window(thread, at);
                self.stream(thread, at).resident_to = end;
            }
        }
    }

    /// The window with trigger page `trigger` will not be followed: the page left staging unused.
    pub fn on_window_dead(&mut self, trigger: u64) {
        let Some((thread, at)) = self.find_trigger(0, trigger) else { return };
        self.window_failed(thread, at);
    }

    fn window_failed(&mut self, thread: usize, at: usize) {
        let stream = self.stream(thread, at);
        let wasted = stream.tail + stream.open.map_or(0, |open| open.fetched);
        stream.tail = 0;
        stream.depth /= 4;
        stream.history.clear();
        self.counters.waste += u64::from(wasted);
        self.close_window(thread, at);
        let standing = &mut self.threads[thread].standing;
        *standing -= standing.div_ceil(4);
    }

    fn stream(&mut self, thread: usize, at: usize) -> &mut Stream {
        self.threads[thread].streams[at].as_mut().expect("the index came from a search")
    }

    /// A trend was found: opens the stream's window unless the thread's standing forbids it.
    fn open_first_window(
        &mut self,
        thread: usize,
        at: usize,
        page: u64,
        stride: i64,
    ) -> Option<Window> {
        let standing = self.threads[thread].standing;
        if standing < BAD_STANDING {
            self.threads[thread].unprobed += 1;
            if self.threads[thread].unprobed < PROBE_INTERVAL {
                self.counters.suppressed += 1;
                return None;
            }
            self.threads[thread].unprobed = 0;
        }
        let first = match standing {
            GOOD_STANDING.. => FIRST_WINDOW,
            BAD_STANDING.. => FIRST_WINDOW_IN_DOUBT,
            _ => PROBE_WINDOW,
        };
        let depth = self.stream(thread, at).depth.max(first);
        self.open_window(thread, at, page, page, stride, depth)
    }

    /// Opens the window that follows `last` by `stride`, the program being at `seen`.
    fn open_window(
        &mut self,
        thread: usize,
        at: usize,
        seen: u64,
        last: u64,
        stride: i64,
        depth: u32,
    ) -> Option<Window> {
        let room = self.limits.ahead_pages.saturating_sub(self.ahead);
        let depth = depth.min(self.limits.window_pages);
        // Downwards there are only so many pages left.
        let left = if stride < 0 { last / stride.unsigned_abs() } else { u64::from(u32::MAX) };
        let count = depth.min(room).min(left.min(u64::from(u32::MAX)) as u32);
        let stream = self.stream(thread, at);
        stream.last = seen;
        stream.resident_to = seen;
        stream.depth = depth;
        if count == 0 {
            return None;
        }
        let start = last.wrapping_add_signed(stride);
        let window = Window { start, stride, count, trigger: count / 2 };
        stream.open = Some(Open {
            stride,
            next: start.wrapping_add_signed(stride * i64::from(count)),
            planned: count,
            fetched: count,
            trigger: window.trigger_page(),
        });
        self.ahead += count;
        self.opened_last = thread;
        self.counters.windows += 1;
        self.counters.prefetched += u64::from(count);
        Some(window)
    }

    fn close_window(&mut self, thread: usize, at: usize) {
        if let Some(open) = self.stream(thread, at).open.take() {
            self.ahead -= open.planned;
        }
    }

    /// The stream whose trigger `page` is. Streams wander between threads rarely: `first` is
    /// searched first.
    fn find_trigger(&self, first: usize, page: u64) -> Option<(usize, usize)> {
        let in_thread = |thread: usize| {
            let is_it = |stream: &Option<Stream>| {
                stream.as_ref().and_then(|s| s.open).is_some_and(|open| open.trigger == page)
            };
            self.threads.get(thread)?.streams.iter().position(is_it).map(|at| (thread, at))
        };
        in_thread(first).or_else(|| (0..self.threads.len()).find_map(in_thread))
    }

    fn thread_index(&mut self, id: u64) -> usize {
        let now = self.now;
        let at = match self.threads.iter().position(|thread| thread.id == id) {
            Some(at) => at,
            None if self.threads.len() < MAX_THREADS => {
                self.threads.push(Thread::new(id));
                self.threads.len() - 1
            }
            None => {
                let oldest = self.threads.iter().enumerate().min_by_key(|(_, t)| t.used_at);
                let at = oldest.map_or(0, |(at, _)| at);
                let open = self.threads[at].streams.iter().flatten().filter_map(|s| s.open);
                self.ahead -= open.map(|open| open.planned).sum::<u32>();
                self.threads[at] = Thread::new(id);
                at
            }
        };
        self.threads[at].used_at = now;
        at
    }

    fn begin_stream(&mut self, thread: usize, page: u64) -> usize {
        let fresh = Stream {
            last: page,
            resident_to: page,
            history: History::default(),
            depth: 0,
            open: None,
            tail: 0,
            used_at: self.now,
        };
        let streams = &self.threads[thread].streams;
        // An empty place, else the stalest stream; one without an open window if possible.
        let place = streams.iter().enumerate().min_by_key(|(_, stream)| {
            stream.as_ref().map(|stream| (stream.open.is_some(), stream.used_at))
        });
        let at = place.map_or(0, |(at, _)| at);
        if streams[at].as_ref().is_some_and(|stream| stream.open.is_some()) {
            // More beginnings than continuations: most of them were none.
            self.window_failed(thread, at);
        }
        self.threads[thread].streams[at] = Some(fresh);
        at
    }
}

impl Thread {
    fn new(id: u64) -> Self {
        Self {
            id,
            used_at: 0,
            standing: INITIAL_STANDING,
            unprobed: 0,
            recent: Recent::default(),
            streams: [None; STREAMS_PER_THREAD],
        }
    }

    /// The stream that `page` continues: one whose open window it touches or passes, else the
    /// nearest.
    fn nearest_stream(&self, page: u64) -> Option<usize> {
        let distance = |stream: &Stream| match &stream.open {
            Some(open) => open.covers(page, stream.last).then_some(0),
            None => {
                let (low, high) =
                    (stream.last.min(stream.resident_to), stream.last.max(stream.resident_to));
                let distance = page.abs_diff(page.clamp(low, high));
                let delta = page.wrapping_sub(stream.last) as i64;
                let foreseen = stream.history.newest().is_some_and(|d| i64::from(d) == delta);
                if foreseen {
                    return Some(0);
                }
                (distance <= STREAM_RADIUS_PAGES).then_some(distance)
            }
        };
        self.streams
            .iter()
            .enumerate()
            .filter_map(|(at, stream)| Some((distance(stream.as_ref()?)?, at)))
            .min()
            .map(|(_, at)| at)
    }
}

/// A thread's last faults, in which long strides are found: neighbours in time that lie too far
/// apart to be taken for one stream.
#[derive(Default)]
struct Recent {
    pages: [u64; RECENT_FAULTS],
    head: usize,
}

impl Recent {
    fn push(&mut self, page: u64) {
        self.head = (self.head + 1) % RECENT_FAULTS;
        self.pages[self.head] = page;
    }

    /// The stride of the newest fault's stream, if the faults come from a few strided streams in
    /// turn: with `n` of them, every n-th fault is of the same stream.
    fn long_stride(&self) -> Option<i64> {
        let back = |steps: usize| self.pages[(self.head + RECENT_FAULTS - steps) % RECENT_FAULTS];
        (1..=MAX_INTERLEAVED_STRIDES).find_map(|lag| {
            let delta = |step: usize| back(step * lag).wrapping_sub(back((step + 1) * lag)) as i64;
            let stride = delta(0);
            let long = (STREAM_RADIUS_PAGES..=MAX_STRIDE_PAGES).contains(&stride.unsigned_abs());
            (long && (1..STRIDE_RUN).all(|step| delta(step) == stride)).then_some(stride)
        })
    }
}

impl Open {
    /// Pages from `from` to `page` in the stream's direction.
    fn ahead_of(&self, from: u64, page: u64) -> i64 {
        (page.wrapping_sub(from) as i64).saturating_mul(self.stride.signum())
    }

    fn is_past_end(&self, page: u64) -> bool {
        self.ahead_of(self.next, page) >= 0
    }

    /// Whether `page` lies on the stream between `last` and one window past the end.
    fn covers(&self, page: u64, last: u64) -> bool {
        let reach = self.stride.abs().saturating_mul(i64::from(self.planned));
        self.ahead_of(last, page) >= 0
            && self.ahead_of(self.next, page) <= reach
            && (page.wrapping_sub(self.next) as i64) % self.stride == 0
    }
}
