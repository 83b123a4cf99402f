//! Decides who may read or write a shared volume, and until when.
//!
//! Pure: no clock, socket or thread. A reader answers clients from tables that it has fetched, only
//! with a lease of the volume's owner. The owner admits no writer until the last lease has run out.
//! The two clocks are never compared: the reader counts from before it asked, the owner from after
//! it heard that. The owner waits [`MARGIN`] longer, as clocks run at different rates.
//!
//! The contents have a number, the *edition*, drawn anew before each writer is admitted. Tables are
//! valid only with a lease of the same edition.

use std::collections::BTreeMap;
use std::time::Duration;

/// Duration of a lease at the reader.
pub(crate) const TERM: Duration = Duration::from_secs(5);

/// Extra wait of the owner: a fifth of [`TERM`], and clocks do not differ by as much.
pub(crate) const MARGIN: Duration = Duration::from_secs(1);

/// Most leases at a time.
pub const MAX_READERS: usize = 32;

/// Leases that the owner of a volume has granted.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// Keyed by session: the next process of a node is a new reader.
    granted: BTreeMap<u64, Granted>,
    /// Until then, leases that an earlier process has granted may last.
    forgotten_until: Option<Duration>,
}

#[derive(Debug)]
struct Granted {
    node: String,
    until: Duration,
}

/// A reader that blocks a writer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// A node with a lease.
    Node(String),
    /// Unknown readers with leases of an earlier process, which last at most this long.
    Forgotten(Duration),
}

/// [`MAX_READERS`] leases are granted already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooMany;

impl Leases {
    /// Leases of a successor, whose predecessor may have granted some until `now`.
    pub(crate) fn after_another(now: Duration) -> Leases {
        Leases { granted: BTreeMap::new(), forgotten_until: Some(now + TERM + MARGIN) }
    }

    /// Grants or renews a lease. Returns true if the session had no lease that still lasted.
    pub(crate) fn grant(
        &mut self,
        session: u64,
        node: &str,
        now: Duration,
    ) -> Result<bool, TooMany> {
        self.expire(now);
        let is_new = !self.granted.contains_key(&session);
        if is_new && self.granted.len() >= MAX_READERS {
            return Err(TooMany);
        }
        let granted = Granted { node: node.to_owned(), until: now + TERM + MARGIN };
        self.granted.insert(session, granted);
        Ok(is_new)
    }

    /// Ends the lease of a reader that says it has stopped answering.
    pub(crate) fn leave(&mut self, session: u64) {
        self.granted.remove(&session);
    }

    /// A reader that blocks a writer, if any.
    pub(crate) fn holder(&mut self, now: Duration) -> Option<Holder> {
        self.expire(now);
        let node = self.granted.values().next().map(|granted| Holder::Node(granted.node.clone()));
        let left = |until: Duration| Holder::Forgotten(until.saturating_sub(now));
        node.or_else(|| self.forgotten_until.map(left))
    }

    /// Nodes with leases, each once.
    pub(crate) fn nodes(&mut self, now: Duration) -> Vec<String> {
        self.expire(now);
        let mut nodes: Vec<_> = self.granted.values().map(|lease| lease.node.clone()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    fn expire(&mut self, now: Duration) {
        self.granted.retain(|_, granted| now < granted.until);
        self.forgotten_until = self.forgotten_until.filter(|until| now < *until);
    }
}

/// A reader's right to answer its clients.
#[derive(Debug, Default)]
pub(crate) struct Tenure {
    /// Edition of its tables; 0: it has none.
    tables: u64,
    lease: Option<Lease>,
    /// Reason why the owner refused a lease, if it did.
    refused: Option<String>,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    edition: u64,
    until: Duration,
}

/// State of a reader's right to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It may answer from its tables.
    Holds,
    /// The owner has not answered for too long.
    Silent,
    /// Its tables are from before a writer was admitted.
    Outdated,
    /// The owner refuses a lease, for this reason.
    Refused(String),
}

impl Tenure {
    /// A reader with tables of an edition, and no lease.
    pub(crate) fn of_tables(edition: u64) -> Tenure {
        Tenure { tables: edition, ..Tenure::default() }
    }

    /// Notes a lease that the reader asked for at `asked_at`.
    pub(crate) fn granted(&mut self, asked_at: Duration, edition: u64) {
        self.lease = Some(Lease { edition, until: asked_at + TERM });
        self.refused = None;
    }

    /// Notes a refusal. It ends the lease before it at once: a writer may write now.
    pub(crate) fn refused(&mut self, why: String) {
        self.lease = None;
        self.refused = Some(why);
    }

    /// Sets the edition of the tables; 0 while they change.
    pub(crate) fn set_tables(&mut self, edition: u64) {
        self.tables = edition;
    }

    /// Edition of the tables; 0: none.
    pub(crate) fn tables(&self) -> u64 {
        self.tables
    }

    /// State of the right to answer at `now`.
    pub(crate) fn standing(&self, now: Duration) -> Standing {
        match (&self.lease, &self.refused) {
            (_, Some(why)) => Standing::Refused(why.clone()),
            // A change of edition stays known, whether the lease lasts or not.
            (Some(lease), None) if lease.edition != self.tables => Standing::Outdated,
            (Some(lease), None) if now < lease.until => Standing::Holds,
            _ => Standing::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_silent_reader_is_waited_for() {
        let mut leases = Leases::default();
        assert_eq!(leases.holder(at(0)), None);
        assert_eq!(leases.grant(1, "b", at(0)), Ok(true));
        assert_eq!(leases.grant(1, "b", at(4_000)), Ok(false));
        assert_eq!(leases.holder(at(9_999)), Some(Holder::Node("b".into())));
        assert_eq!(leases.holder(at(10_000)), None);
        assert_eq!(leases.grant(1, "b", at(10_000)), Ok(true), "it was away");
        assert_eq!(leases.grant(2, "b", at(10_000)), Ok(true), "another process");
        assert_eq!(leases.nodes(at(10_001)), ["b"]);
        leases.leave(1);
        assert_eq!(leases.holder(at(10_002)), Some(Holder::Node("b".into())));
        leases.leave(2);
        assert_eq!(leases.holder(at(10_002)), None);
    }

    #[test]
    fn those_that_a_process_before_has_let_in_are_waited_for() {
        let mut leases = Leases::after_another(at(1_000));
        assert_eq!(leases.holder(at(1_000)), Some(Holder::Forgotten(TERM + MARGIN)));
        leases.grant(1, "b", at(2_000)).unwrap();
        leases.leave(1);
        assert_eq!(leases.holder(at(6_999)), Some(Holder::Forgotten(at(1))));
        assert_eq!(leases.holder(at(7_000)), None);
    }

    #[test]
    fn there_are_not_too_many() {
        let mut leases = Leases::default();
        for session in 0..MAX_READERS as u64 {
            leases.grant(session, "b", at(0)).unwrap();
        }
        assert_eq!(leases.grant(99, "c", at(1)), Err(TooMany));
        assert_eq!(leases.grant(0, "b", at(1)), Ok(false));
        assert_eq!(leases.grant(99, "c", at(6_000)), Ok(true));
    }

    #[test]
    fn a_reader_holds_with_a_lease_of_its_tables() {
        let mut tenure = Tenure::of_tables(7);
        assert_eq!(tenure.standing(at(0)), Standing::Silent);
        tenure.granted(at(100), 7);
        assert_eq!(tenure.standing(at(5_099)), Standing::Holds);
        assert_eq!(tenure.standing(at(5_100)), Standing::Silent);
        tenure.refused("no".into());
        assert_eq!(tenure.standing(at(101)), Standing::Refused("no".into()));
        tenure.granted(at(200), 8);
        assert_eq!(tenure.standing(at(201)), Standing::Outdated);
        assert_eq!(tenure.standing(at(9_000)), Standing::Outdated, "it does not forget");
        tenure.set_tables(8);
        assert_eq!((tenure.tables(), tenure.standing(at(201))), (8, Standing::Holds));
    }

    /// All events, in any order. Indices are taken modulo the number of entries.
    #[derive(Clone, Debug)]
    enum Event {
        Passes(u64),
        Asks(usize),
        /// A question reaches the owner, or is lost.
        Heard(usize, bool),
        /// An answer reaches its reader, or is lost.
        Answered(usize, bool),
        FetchesTables(usize),
        HasTables(usize),
        /// A client wants to write.
        Writes,
        /// The owner's process is killed, and a successor starts.
        Dies,
        /// A reader's process is killed; its successor has its tables.
        ReaderDies(usize),
        Leaves(usize),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (0u64..3_000).prop_map(Event::Passes),
            4 => (0usize..3).prop_map(Event::Asks),
            6 => (0usize..8, prop::bool::weighted(0.9)).prop_map(|(at, is)| Event::Heard(at, is)),
            6 => (0usize..8, prop::bool::weighted(0.9)).prop_map(|(at, is)| Event::Answered(at, is)),
            3 => (0usize..3).prop_map(Event::FetchesTables),
            3 => (0usize..3).prop_map(Event::HasTables),
            3 => Just(Event::Writes),
            1 => Just(Event::Dies),
            1 => (0usize..3).prop_map(Event::ReaderDies),
            1 => (0usize..3).prop_map(Event::Leaves),
        ]
    }

    struct Reader {
        session: u64,
        /// Its clock runs at so many thousandths of the owner's rate, and starts at `began`.
        rate: u64,
        began: u64,
        tenure: Tenure,
        /// Version of the contents that its tables show.
        contents: u64,
        /// Edition and contents of the tables that it fetches.
        coming: Option<(u64, u64)>,
    }

    impl Reader {
        fn clock(&self, now: u64) -> Duration {
            at(self.began + now * self.rate / 1000)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        /// No reader answers from tables that are older than the last write.
        #[test]
        fn nobody_reads_what_was_there_before_a_write(
            events in prop::collection::vec(event(), 1..120),
            clocks in prop::collection::vec((900u64..1100, 0u64..1_000_000), 3),
        ) {
            let (mut now, mut contents, mut edition, mut writes) = (0, 0u64, 1u64, 0u32);
            let (mut leases, mut are_out, mut sessions) = (Leases::default(), false, 0u64);
            let mut readers: Vec<Reader> = clocks.into_iter().enumerate().map(|(number, (rate, began))| {
                sessions += 1;
                let tenure = Tenure::default();
                Reader { session: number as u64 + 1, rate, began, tenure, contents: 0, coming: None }
            }).collect();
            let mut asked: Vec<(usize, u64, Duration)> = Vec::new();
            let mut answers: Vec<(usize, u64, Duration, Result<u64, String>)> = Vec::new();
            for event in events {
                match event {
                    Event::Passes(ms) => now += ms,
                    Event::Asks(reader) => {
                        asked.push((reader, readers[reader].session, readers[reader].clock(now)));
                    }
                    Event::Heard(which, is_heard) if !asked.is_empty() => {
                        let (reader, session, asked_at) = asked.remove(which % asked.len());
                        if is_heard {
                            let granted = leases.grant(session, "b", at(now));
                            are_out |= granted.is_ok();
                            let answer = granted.map(|_| edition).map_err(|_| String::new());
                            answers.push((reader, session, asked_at, answer));
                        }
                    }
                    Event::Answered(which, is_heard) if !answers.is_empty() => {
                        let (reader, session, asked_at, answer) = answers.remove(which % answers.len());
                        let reader = &mut readers[reader];
                        if is_heard && reader.session == session {
                            match answer {
                                Ok(edition) => reader.tenure.granted(asked_at, edition),
                                Err(why) => reader.tenure.refused(why),
                            }
                        }
                    }
                    Event::Heard(..) | Event::Answered(..) => {}
                    Event::FetchesTables(reader) => {
                        readers[reader].tenure.set_tables(0);
                        readers[reader].coming = Some((edition, contents));
                    }
                    Event::HasTables(reader) => {
                        let reader = &mut readers[reader];
                        if let Some((edition, contents)) = reader.coming.take() {
                            reader.contents = contents;
                            reader.tenure.set_tables(edition);
                        }
                    }
                    Event::Writes => {
                        if leases.holder(at(now)).is_none() {
                            edition += 1;
                            contents += 1;
                            are_out = false;
                            writes += 1;
                        }
                    }
                    Event::Dies => {
                        leases = match are_out {
                            true => Leases::after_another(at(now)),
                            false => Leases::default(),
                        };
                    }
                    Event::ReaderDies(reader) => {
                        sessions += 10;
                        let reader = &mut readers[reader];
                        reader.session = sessions;
                        reader.tenure = Tenure::of_tables(reader.tenure.tables());
                        reader.coming = None;
                    }
                    Event::Leaves(reader) => {
                        let reader = &mut readers[reader];
                        reader.tenure.refused("it has left".to_owned());
                        leases.leave(reader.session);
                        sessions += 10;
                        reader.session = sessions;
                    }
                }
                for reader in &readers {
                    if reader.tenure.standing(reader.clock(now)) == Standing::Holds {
                        prop_assert_eq!(reader.contents, contents, "after {} writes", writes);
                    }
                }
            }
        }
    }
}
