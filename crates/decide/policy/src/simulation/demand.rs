//! Reads recorded memory demand of real programs (see `traces/README.md`).
//!
//! For each second, a trace has the pages that a program had in memory and those that it
//! referenced. The simulation takes only referenced pages that existed before: a page that is new
//! in this second has no place to be read from. A trace does not show how often a page is
//! referenced within a second, nor which page. Pages referenced in every second count as much as
//! pages that take turns, though a machine's own reclaim would keep the former in its RAM.

/// One second of a program that has all of its memory in RAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Second {
    /// Pages that the program has at the end of the second.
    pub(super) footprint_pages: u64,
    /// Pages that the program touched, out of those that it had before.
    pub(super) touched_pages: u64,
}

/// Why a text is not a demand trace.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DemandError {
    /// A line is not two numbers of pages.
    #[error(
        "line {line} of a demand trace is not two numbers of pages, in memory and referenced: {text:?}"
    )]
    Line {
        /// Line number, from 1.
        line: usize,
        /// The text of the line.
        text: String,
    },
    /// The trace is empty, or has only comments.
    #[error("a demand trace has no seconds; record it anew")]
    Empty,
}

/// The recorded programs.
#[derive(Clone, Debug)]
pub struct Demands {
    pub(super) in_memory: Vec<Second>,
    pub(super) graph: Vec<Second>,
    pub(super) caching_client: Vec<Second>,
    pub(super) caching_server: Vec<Second>,
}

impl Demands {
    /// Parses the traces of this repository.
    ///
    /// # Errors
    ///
    /// If a trace in the repository is damaged.
    pub fn recorded() -> Result<Demands, DemandError> {
        Ok(Demands {
            in_memory: parse(include_str!("../../traces/demand/in-memory.demand"))?,
            graph: parse(include_str!("../../traces/demand/graph.demand"))?,
            caching_client: parse(include_str!("../../traces/demand/caching-client.demand"))?,
            caching_server: parse(include_str!("../../traces/demand/caching-server.demand"))?,
        })
    }
}

fn parse(text: &str) -> Result<Vec<Second>, DemandError> {
    let mut seconds = Vec::new();
    let mut before = 0;
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
        let numbers = line.split_once(' ').and_then(|(resident, referenced)| {
            Some((resident.parse::<u64>().ok()?, referenced.parse::<u64>().ok()?))
        });
        let Some((footprint_pages, referenced)) = numbers else {
            return Err(DemandError::Line { line: at + 1, text: line.to_owned() });
        };
        let new = footprint_pages.saturating_sub(before);
        seconds.push(Second { footprint_pages, touched_pages: referenced.saturating_sub(new) });
        before = footprint_pages;
    }
    if seconds.is_empty() { Err(DemandError::Empty) } else { Ok(seconds) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_pages_are_not_touched_again() {
        let second = |footprint_pages, touched_pages| Second { footprint_pages, touched_pages };
        let seconds = parse("# a program\n100 100\n150 70\n120 30\n120 0\n").unwrap();
        assert_eq!(seconds, [second(100, 0), second(150, 20), second(120, 30), second(120, 0)]);
    }

    #[test]
    fn what_is_no_trace_is_refused_by_its_line() {
        for bad in ["", "7", "7 8 9", "-7 8", "7  8", "seven 8", "7.5 8"] {
            let refused = parse(&format!("# a program\n1 1\n{bad}\n2 2\n"));
            assert_eq!(refused, Err(DemandError::Line { line: 3, text: bad.to_owned() }));
        }
        assert_eq!(parse("# a program\n"), Err(DemandError::Empty));
    }

    /// Each program needs more than its machine's RAM in table IV, and far less than a cluster has.
    #[test]
    fn the_recorded_programs_are_of_the_sizes_that_the_scenarios_need() {
        let Demands { in_memory, graph, caching_client, caching_server } =
            Demands::recorded().unwrap();
        for (seconds, mib) in [
            (in_memory, 1200..1500),
            (graph, 1400..1700),
            (caching_client, 500..700),
            (caching_server, 600..900),
        ] {
            let most = seconds.iter().map(|second| second.footprint_pages / 256).max().unwrap();
            assert!(mib.contains(&most), "{most} MiB, not in {mib:?}");
            assert!((30..200).contains(&seconds.len()), "{} s", seconds.len());
            let touched: u64 = seconds.iter().map(|second| second.touched_pages).sum();
            assert!(touched > 10_000, "{touched} pages");
        }
    }
}
