//! `hecaton volume list` and `hecaton volume status`.

use super::uri;
use crate::cluster::{ClusterArgs, ListArgs};
use crate::terminal::table::Table;
use anyhow::bail;
use hecaton_block::Stats;
use hecaton_memory::{Size, pages_to_bytes};
use hecaton_node::volumes::{ExportAddress, VolumeReport, VolumeState};
use hecaton_space::SpaceStatus;
use std::fmt::Write as _;

/// Arguments of `hecaton volume status`.
#[derive(clap::Args)]
pub(crate) struct StatusArgs {
    /// The volume
    name: String,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn list(args: &ListArgs) -> anyhow::Result<()> {
    let report = args.cluster.need_local_node()?.status()?;
    if args.json {
        println!("{}", serde_json::to_string(&report.volumes)?);
    } else {
        print!("{}", table(report.volumes.iter().map(|volume| (report.name.as_str(), volume))));
    }
    Ok(())
}

pub(crate) fn status(args: &StatusArgs) -> anyhow::Result<()> {
    let report = args.cluster.need_local_node()?.status()?;
    let Some(volume) = report.volumes.iter().find(|volume| volume.name == args.name) else {
        bail!("the node has no volume `{}`; `hecaton volume list` names those it has", args.name);
    };
    if args.json {
        println!("{}", serde_json::to_string(volume)?);
    } else {
        print!("{}", describe(&report.name, volume));
    }
    Ok(())
}

/// Volumes, each with the node that serves it.
pub(crate) fn table<'a>(volumes: impl Iterator<Item = (&'a str, &'a VolumeReport)>) -> Table {
    let mut table = Table::new([
        "VOLUME",
        "NODE",
        "STATE",
        ">SIZE",
        ">DATA",
        ">COPIES",
        ">EXPORTS",
        ">CLIENTS",
        ">READS",
        ">WRITES",
        ">ERRORS",
        ">RESTARTS",
    ]);
    for (node, volume) in volumes {
        let shown = |value: fn(&Stats) -> String| {
            volume.stats.as_ref().map_or_else(|| "-".to_owned(), value)
        };
        table.row([
            volume.name.clone(),
            node.to_owned(),
            state(volume).to_owned(),
            size(volume.size_bytes),
            shown(|stats| size(stats.data_bytes)),
            volume.copies.to_string(),
            volume.exports.len().to_string(),
            shown(|stats| stats.clients.to_string()),
            shown(|stats| stats.reads.to_string()),
            shown(|stats| stats.writes.to_string()),
            shown(|stats| stats.errors.to_string()),
            volume.restarts.to_string(),
        ]);
    }
    table
}

/// Says how much of the pool the policy lets a volume hold.
pub(crate) fn target(volume: &VolumeReport) -> Option<String> {
    let stats = volume.stats.as_ref()?;
    let (target, held) = (size(stats.target_bytes?), size(stats.pool_bytes()));
    let (puts, within) = (stats.puts_total, stats.puts_succeeded);
    let taken_back = match stats.taken_back_bytes {
        0 => String::new(),
        bytes => format!(", {} was taken back", size(bytes)),
    };
    Some(format!(
        "{}: may hold {target} of the pool by the policy, holds {held}; {within} of {puts} puts were \
         within{taken_back}",
        volume.name
    ))
}

/// Says which parts of a volume lack copies, wait for copying, are lost or unwritten.
pub(crate) fn risk(volume: &VolumeReport) -> Option<String> {
    let stats = volume.stats.as_ref()?;
    let pool = &stats.pool;
    let mut parts = Vec::new();
    for (segments, what) in [
        (pool.segments_degraded, "lacks a copy"),
        (pool.segments_untended, "is to be copied or moved"),
        (pool.segments_lost, "is lost"),
    ] {
        if segments > 0 {
            parts.push(format!("{} {what}", size(segment_bytes(pool, segments))));
        }
    }
    if stats.unkept_bytes > 0 {
        parts.push(format!("{} could not be written", size(stats.unkept_bytes)));
    }
    let all = size(segment_bytes(pool, pool.segments_held + pool.segments_lost));
    (!parts.is_empty()).then(|| format!("{}: of {all}, {}", volume.name, parts.join(", ")))
}

fn describe(node: &str, volume: &VolumeReport) -> String {
    let mut text = table([(node, volume)].into_iter()).to_string();
    if let Some(of) = &volume.snapshot_of {
        let _ = writeln!(text, "a snapshot of {of}, to be read only");
    }
    if volume.encrypted {
        text += "encrypted: donors have ciphertext only\n";
    }
    if let Some(offer) = &volume.detached {
        let _ =
            writeln!(text, "detached for node {}, which gets it at {}", offer.to, offer.address);
    }
    if let Some(from) = &volume.reads_from {
        let _ = writeln!(
            text,
            "read here; node {} has it, and shares it at {}",
            from.node, from.address
        );
    }
    if let Some(why) = volume.stats.as_ref().and_then(|stats| stats.unheld.as_ref()) {
        let _ = writeln!(text, "cannot be read now: {why}");
    }
    for export in &volume.exports {
        if let ExportAddress::Nodes(Some(address)) = export.address {
            let readers = volume.stats.as_ref().map_or(&[][..], |stats| &stats.readers);
            let by =
                if readers.is_empty() { "none reads it".to_owned() } else { readers.join(", ") };
            let _ = writeln!(text, "shared with nodes at {address}: {by}");
            continue;
        }
        let read_only = if export.read_only { ", read only" } else { "" };
        let uring = if export.uring { ", through io_uring" } else { "" };
        let _ = writeln!(text, "export: {}{read_only}{uring}", uri(export, &volume.name));
    }
    if let Some(writer) = volume.stats.as_ref().and_then(|stats| stats.writer.as_ref()) {
        let _ = writeln!(text, "writer: {writer}");
    }
    if let Some(stats) = &volume.stats {
        let pool = &stats.pool;
        let holding = pool.donors.iter().filter(|donor| donor.extents > 0);
        let donors: Vec<String> = holding
            .map(|donor| {
                // A reader does not ask donors for their state.
                let is_known = volume.reads_from.is_none();
                let away = if is_known && !donor.reachable { ", away" } else { "" };
                format!("{} ({}{away})", donor.name, size(donor.bytes_held))
            })
            .collect();
        let held = if donors.is_empty() { "nobody yet".to_owned() } else { donors.join(", ") };
        let extents = size(segment_bytes(pool, pool.segments_held));
        let _ = writeln!(text, "pool: {extents} in extents, copies: {}; {held}", pool.copies);
    }
    if let Some(stats) = volume.stats.as_ref().filter(|stats| stats.buffered_bytes > 0) {
        let _ = writeln!(text, "write buffer: {}", size(stats.buffered_bytes));
    }
    if let (Some(spill), Some(stats)) = (&volume.spill, &volume.stats) {
        let limit = volume.limit_bytes.map_or_else(String::new, |limit| {
            format!("; no more than {} in the pool", size(limit))
        });
        let _ =
            writeln!(text, "spill: {} in {}{limit}", size(stats.spilled_bytes), spill.display());
    }
    if let Some(target) = target(volume) {
        let _ = writeln!(text, "{target}");
    }
    if let Some(risk) = risk(volume) {
        let _ = writeln!(text, "{risk}");
    }
    if let Some(error) = &volume.last_error {
        let _ = writeln!(text, "its process was started again: {error}");
    }
    text
}

fn segment_bytes(pool: &SpaceStatus, segments: u64) -> u64 {
    pages_to_bytes(segments * pool.segment_pages)
}

fn state(volume: &VolumeReport) -> &'static str {
    match volume.state {
        VolumeState::Serving if volume.detached.is_some() => "detached",
        VolumeState::Serving if volume.reads_from.is_some() => "reading",
        VolumeState::Starting => "starting",
        VolumeState::Serving => "serving",
        VolumeState::Ending => "ending",
    }
}

fn size(bytes: u64) -> String {
    Size(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_block::readers::SharedBy;
    use hecaton_memory::{Epoch, SpaceId};
    use hecaton_node::volumes::Exported;

    fn volume() -> VolumeReport {
        let pool = SpaceStatus {
            id: SpaceId(1),
            epoch: Epoch(1),
            pages: 1 << 18,
            segment_pages: 4096,
            segments: 64,
            copies: 2,
            segments_held: 8,
            segments_degraded: 0,
            segments_untended: 0,
            segments_lost: 0,
            code: None,
            segments_coded: 0,
            bytes_saved: 0,
            bytes_filled: 0,
            scrub: Default::default(),
            fenced: false,
            donors: Vec::new(),
        };
        let stats = Stats {
            size_bytes: 1 << 30,
            data_bytes: 96 << 20,
            spilled_bytes: 32 << 20,
            taken_at_ms: 0,
            unkept_bytes: 0,
            buffered_bytes: 0,
            target_bytes: None,
            puts_total: 9,
            puts_succeeded: 7,
            gets: 0,
            taken_back_bytes: 0,
            clients: 1,
            readers: Vec::new(),
            is_anothers: false,
            unheld: None,
            writer: Some("process 7 (qemu)".to_owned()),
            reads: 12,
            read_bytes: 0,
            writes: 34,
            written_bytes: 0,
            dropped_bytes: 0,
            errors: 0,
            unsettled: 0,
            pool,
        };
        VolumeReport {
            name: "scratch".to_owned(),
            state: VolumeState::Serving,
            size_bytes: 1 << 30,
            copies: 2,
            exports: vec![Exported {
                address: "unix:/run/a.sock".parse().unwrap(),
                read_only: true,
                tls: None,
                uring: false,
            }],
            spill: Some("/var/a.spill".into()),
            limit_bytes: Some(64 << 20),
            stats: Some(stats),
            ..VolumeReport::default()
        }
    }

    #[test]
    fn a_volume_is_described() {
        let text = describe("local", &volume());
        let row: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let expected =
            ["scratch", "local", "serving", "1G", "96M", "2", "1", "1", "12", "34", "0", "0"];
        assert_eq!(row, expected);
        assert!(
            text.contains("export: nbd+unix:///scratch?socket=/run/a.sock, read only\n"),
            "{text}"
        );
        assert!(text.contains("writer: process 7 (qemu)\n"), "{text}");
        assert!(text.contains("pool: 128M in extents, copies: 2; nobody yet\n"), "{text}");
        let spill = "spill: 32M in /var/a.spill; no more than 64M in the pool\n";
        assert!(text.contains(spill), "{text}");
    }

    #[test]
    fn who_reads_where_is_told() {
        let address = "192.0.2.1:7".parse().unwrap();
        let mut shared = volume();
        shared.exports[0].address = ExportAddress::Nodes(Some(address));
        let text = describe("a", &shared);
        assert!(text.contains("shared with nodes at 192.0.2.1:7: none reads it\n"), "{text}");
        shared.stats.as_mut().unwrap().readers = vec!["b".into(), "c".into()];
        let text = describe("a", &shared);
        assert!(text.contains("shared with nodes at 192.0.2.1:7: b, c\n"), "{text}");
        let mut read = volume();
        read.reads_from = Some(SharedBy { node: "a".into(), address });
        read.stats.as_mut().unwrap().unheld = Some("node `a` is silent".into());
        let text = describe("b", &read);
        assert!(text.contains(" reading "), "{text}");
        assert!(text.contains("node a has it, and shares it at 192.0.2.1:7\n"), "{text}");
        assert!(text.contains("cannot be read now: node `a` is silent\n"), "{text}");
    }

    #[test]
    fn encryption_is_told() {
        for encrypted in [false, true] {
            let text = describe("local", &VolumeReport { encrypted, ..volume() });
            assert_eq!(
                text.contains("encrypted: donors have ciphertext only\n"),
                encrypted,
                "{text}"
            );
        }
    }

    #[test]
    fn what_the_policy_allows_is_told() {
        let mut volume = volume();
        assert_eq!(target(&volume), None);
        let stats = volume.stats.as_mut().unwrap();
        stats.target_bytes = Some(128 << 20);
        let told =
            "scratch: may hold 128M of the pool by the policy, holds 64M; 7 of 9 puts were within";
        assert_eq!(target(&volume).as_deref(), Some(told));
        volume.stats.as_mut().unwrap().taken_back_bytes = 32 << 20;
        assert_eq!(target(&volume).unwrap(), format!("{told}, 32M was taken back"));
        assert!(describe("local", &volume).contains(told));
    }

    #[test]
    fn what_is_at_risk_is_told() {
        let mut volume = volume();
        assert_eq!(risk(&volume), None);
        let stats = volume.stats.as_mut().unwrap();
        stats.pool.segments_degraded = 2;
        stats.pool.segments_lost = 1;
        stats.unkept_bytes = 4096;
        let expected = "scratch: of 144M, 32M lacks a copy, 16M is lost, 4K could not be written";
        assert_eq!(risk(&volume).as_deref(), Some(expected));
    }
}
