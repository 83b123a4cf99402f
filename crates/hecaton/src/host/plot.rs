//! `hecaton host plot`: the report of a recording.

use super::course::{Course, Life, Sample, Stage};
use super::{INTERVAL, kind};
use crate::report::plot::{self, Band, Lane, Span, escape};
use crate::report::{self, key};
use crate::terminal::failure::usage;
use anyhow::Context as _;
use hecaton_memory::Size;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::PathBuf;
use std::process::ExitCode;

/// The classes that are drawn, from below, and their colours: all but what is left to others.
const COLOURS: [(&str, usize); 10] = [
    ("system", 9),
    ("regular", 0),
    ("minimum", 2),
    ("lent_used", 3),
    ("harvested", 4),
    ("ephemeral", 1),
    ("lent_free", 5),
    ("reserved", 6),
    ("buffer", 7),
    ("unassigned", 8),
];

/// Nothing was recorded between samples that are further apart, in seconds.
const LONGEST_S: f64 = 5.0 * INTERVAL.as_secs() as f64;

/// Longest line of a recording: a thousand machines and as many that wait.
const MAX_LINE_BYTES: u64 = 16 << 20;

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 380.0;

/// Arguments of `hecaton host plot`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Output of `hecaton host watch --json`
    #[arg(value_name = "FILE")]
    recording: PathBuf,
    /// The report, one file that is complete in itself
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let name = args.recording.display();
    let file = File::open(&args.recording).with_context(|| format!("cannot open {name}"))?;
    let course = read(BufReader::new(file)).with_context(|| format!("{name} cannot be shown"))?;
    if course.times_s.is_empty() {
        usage!("nothing is recorded in {name}; record with `hecaton host watch --json >{name}`");
    }
    report::write(&args.html, &page(&course))?;
    Ok(ExitCode::SUCCESS)
}

fn read(mut lines: impl BufRead) -> anyhow::Result<Course> {
    let mut course = Course::default();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let count = lines.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line)?;
        // The last line of a recording that goes on, or was killed, may be a part of one.
        if count == 0 || line.last() != Some(&b'\n') && (count as u64) < MAX_LINE_BYTES {
            break;
        }
        let sample: Sample = serde_json::from_slice(&line)
            .with_context(|| format!("line {number} is none of `hecaton host watch --json`"))?;
        course.add(&sample);
    }
    Ok(course)
}

fn page(course: &Course) -> String {
    let mut body = "<p>Every byte that the host's agent divides, by who has it. What is below gives last: regular VMs \
         and harvest VMs' minima; what is above gives first: the buffer. Blank: nothing was recorded.</p>\n"
        .to_owned();
    let nodes: Vec<usize> = (0..course.nodes.len()).collect();
    figure("Host", &nodes, course, &mut body);
    if nodes.len() > 1 {
        for at in nodes {
            figure(&format!("NUMA node {}", course.nodes[at].node), &[at], course, &mut body);
        }
    }
    lanes(course, &mut body);
    events(course, &mut body);
    report::page("A host's memory over time", &body)
}

/// Some of the nodes together.
fn figure(title: &str, nodes: &[usize], course: &Course, body: &mut String) {
    let values = |class: &str| -> Vec<u64> {
        let of = |at: &usize| course.nodes[*at].classes.iter().find(|(name, _)| *name == class);
        let all: Vec<&Vec<u64>> = nodes.iter().filter_map(of).map(|(_, values)| values).collect();
        (0..course.times_s.len()).map(|at| all.iter().map(|values| values[at]).sum()).collect()
    };
    let classes = COLOURS.map(|(class, colour)| (class.replace('_', " "), colour, values(class)));
    let most: u64 = classes.iter().filter_map(|(_, _, values)| values.iter().max()).sum();
    let (unit, unit_bytes) = if most >= 16 << 30 { ("GiB", 1u64 << 30) } else { ("MiB", 1 << 20) };
    let bands: Vec<Band> = classes
        .into_iter()
        .filter(|(_, _, values)| values.iter().any(|bytes| *bytes > 0))
        .map(|(name, colour, values)| {
            let values = values.iter().map(|bytes| *bytes as f64 / unit_bytes as f64);
            Band { colour, name, values: values.collect() }
        })
        .collect();
    let keys: String = bands.iter().rev().map(|band| key(band.colour, &band.name)).collect();
    let svg = plot::areas(&bands, &course.times_s, LONGEST_S, unit, (WIDTH, HEIGHT));
    let _ = writeln!(body, "<figure><h3>{title}{keys}</h3>{svg}</figure>");
}

fn named(life: &Life) -> String {
    format!("{} ({}, {})", life.name, kind(life.kind), Size(life.bytes))
}

fn look(stage: Stage) -> (usize, &'static str) {
    match stage {
        Stage::Waits => (6, "waits"),
        Stage::Runs => (0, "runs"),
        Stage::Warned => (1, "is warned"),
    }
}

fn lanes(course: &Course, body: &mut String) {
    let seconds = course.times_s.last().copied().unwrap_or(0.0);
    let lane = |life: &Life| {
        let ends = life.stages.iter().skip(1).map(|(begin_s, _)| *begin_s);
        let ends = ends.chain([life.ended_s.unwrap_or(seconds)]);
        let spans = life.stages.iter().zip(ends).map(|(&(from, stage), to)| {
            let (colour, name) = look(stage);
            Span { from, to, colour, name: name.to_owned() }
        });
        Lane { name: named(life), spans: spans.collect() }
    };
    let lanes: Vec<Lane> = course.lives.iter().map(lane).collect();
    if lanes.is_empty() {
        return;
    }
    let keys = [Stage::Waits, Stage::Runs, Stage::Warned].map(look);
    let keys: String = keys.into_iter().map(|(colour, name)| key(colour, name)).collect();
    let svg = plot::lanes(&lanes, seconds, WIDTH);
    let _ = writeln!(body, "<figure><h3>Machines{keys}</h3>{svg}</figure>");
}

fn events(course: &Course, body: &mut String) {
    let of = |life: &Life| {
        let name = named(life);
        life.events().into_iter().map(move |(at_s, what)| (at_s, name.clone(), what))
    };
    let mut events: Vec<_> = course.lives.iter().flat_map(of).collect();
    events.sort_by(|a, b| a.0.total_cmp(&b.0));
    if events.is_empty() {
        return;
    }
    body.push_str("<div class=\"wide\"><table><tr><th>machine</th><th>second</th><th></th></tr>");
    for (at_s, name, what) in events {
        let name = escape(&name);
        let _ = write!(body, "<tr><td>{name}</td><td>{at_s:.0}</td><td>{what}</td></tr>");
    }
    body.push_str("</table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::super::course::tests::{course, eviction};
    use super::*;
    use crate::report::assert_complete;
    use hecaton_node::agent::NodeMemoryReport;

    fn lines() -> String {
        let line = |sample| serde_json::to_string(sample).unwrap() + "\n";
        eviction().iter().map(line).collect()
    }

    #[test]
    fn a_recording_is_read_as_it_was_written_but_for_a_torn_end() {
        let whole = lines();
        let again = read(whole.as_bytes()).unwrap();
        assert_eq!(again.times_s.len(), eviction().len());
        assert_eq!(page(&again), page(&course(&eviction())));
        let torn = &whole[..whole.len() - 10];
        assert_eq!(read(torn.as_bytes()).unwrap().times_s.len(), eviction().len() - 1);
        let error = read(format!("{whole}{{}}\n").as_bytes()).unwrap_err();
        assert!(format!("{error:#}").contains("line 8"), "{error:#}");
    }

    #[test]
    fn the_page_has_every_class_that_has_something_and_every_machine() {
        let page = page(&course(&eviction()));
        assert_complete(&page);
        let has = |text: &str| page.contains(text);
        assert!(has("<title>harvested</title>") && has("</span>harvested"), "{page}");
        assert!(!has("unmanaged") && !has("ephemeral"), "{page}");
        assert!(has("&lt;r&gt; (regular, 3G)") && has("starts, after 3 s"), "{page}");
        assert!(has("h (harvest, 1G) is warned</title>"), "{page}");
    }

    #[test]
    fn every_class_of_an_agents_report_has_a_colour_of_its_own() {
        let node = NodeMemoryReport {
            node: 0,
            host_bytes: 0,
            unmanaged_bytes: 0,
            ledger: hecaton_broker::NodeLedger::default(),
        };
        let drawn = COLOURS.map(|(class, _)| class);
        assert_eq!(node.classes().map(|(class, _)| class)[1..], drawn);
        let mut colours = COLOURS.map(|(_, colour)| colour);
        colours.sort_unstable();
        assert_eq!(colours, std::array::from_fn(|at| at));
    }
}
