//! Encodes what a pager and its keeper say to each other.
//!
//! Packets of words in the machine's byte order: the two are of one version.

use hecaton_uffd::files::{FileRun, MAX_FILE_RUNS};

/// From the pager to the keeper.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// Evict these runs, of at most [`MAX_FILE_RUNS`] pages together, from the page cache. One packet of [`Report`]s answers
    /// the order.
    Drop(Vec<FileRun>),
    /// The node holds the connection: when it ends, pager and node are gone.
    Held,
    /// End, once the earlier orders are done.
    End,
}

/// From the keeper to the pager: the outcome for a part of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Report {
    pub(crate) run: FileRun,
    /// The pages are in the page cache: they are pinned, mapped, or in use again.
    pub(crate) is_kept: bool,
}

/// Bytes of the longest packet. An order of at most [`MAX_FILE_RUNS`] pages has no more reports.
pub(crate) const MAX_BYTES: usize = 8 + 24 * MAX_FILE_RUNS;

/// First words of orders.
const DROP: u64 = 1;
const HELD: u64 = 2;
const END: u64 = 3;

/// In the first word of a report.
const KEPT: u64 = 1 << 63;

impl Order {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let (kind, runs) = match self {
            Order::Drop(runs) => (DROP, &runs[..]),
            Order::Held => (HELD, &[][..]),
            Order::End => (END, &[][..]),
        };
        let mut words = vec![kind];
        runs.iter().for_each(|run| words.extend([run.node, run.offset, run.bytes]));
        to_bytes(&words)
    }

    /// `None` if the bytes are no order.
    pub(super) fn parse(bytes: &[u8]) -> Option<Order> {
        let words = words(bytes)?;
        let (&kind, rest) = words.split_first()?;
        match kind {
            DROP => Some(Order::Drop(runs(rest)?)),
            HELD => Some(Order::Held),
            END => Some(Order::End),
            _ => None,
        }
    }
}

impl Report {
    pub(super) fn all_to_bytes(reports: &[Report]) -> Vec<u8> {
        let flag = |report: &Report| if report.is_kept { KEPT } else { 0 };
        let words: Vec<u64> = reports
            .iter()
            .flat_map(|it| [it.run.node | flag(it), it.run.offset, it.run.bytes])
            .collect();
        to_bytes(&words)
    }

    /// `None` if the bytes are no reports.
    pub(crate) fn parse_all(bytes: &[u8]) -> Option<Vec<Report>> {
        let runs = runs(&words(bytes)?)?;
        let report = |run: FileRun| Report {
            run: FileRun { node: run.node & !KEPT, ..run },
            is_kept: run.node & KEPT != 0,
        };
        (!runs.is_empty()).then(|| runs.into_iter().map(report).collect())
    }
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn words(bytes: &[u8]) -> Option<Vec<u64>> {
    let (words, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| words.iter().map(|word| u64::from_ne_bytes(*word)).collect())
}

fn runs(words: &[u64]) -> Option<Vec<FileRun>> {
    let (runs, rest) = words.as_chunks::<3>();
    let run = |&[node, offset, bytes]: &[u64; 3]| FileRun { node, offset, bytes };
    rest.is_empty().then(|| runs.iter().map(run).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_reports_parse_from_their_bytes() {
        let runs = [1, 2].map(|node| FileRun { node, offset: 8192, bytes: 4096 });
        for order in [Order::Drop(runs.to_vec()), Order::Held, Order::End] {
            assert_eq!(Order::parse(&order.to_bytes()), Some(order));
        }
        assert_eq!(Order::parse(&[1; 5]), None);
        assert_eq!(Order::parse(&[]), None);
        let reports = [(runs[0], false), (runs[1], true)];
        let reports = reports.map(|(run, is_kept)| Report { run, is_kept });
        assert_eq!(Report::parse_all(&Report::all_to_bytes(&reports)), Some(reports.to_vec()));
        assert_eq!(Report::parse_all(&[]), None);
        let most = vec![runs[0]; MAX_FILE_RUNS];
        assert_eq!(Order::Drop(most).to_bytes().len(), MAX_BYTES);
    }
}
