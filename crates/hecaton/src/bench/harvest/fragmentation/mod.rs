//! Measures how much of the memory that an application gives back is whole huge pages, with small
//! and with huge pages. Draws figure 9 of the paper (section 6.2). Then measures the memory that
//! the host gets by a balloon, which gives pages, and by virtio-mem, which gives blocks.

mod holes;
mod picture;
mod snapshot;

use super::{
    Bench,
    guest::{Guest, ManagerInside, Starting, TICK},
    loads::Load,
};
use crate::bench::machine::program_in_guest;
use crate::bench::world::interrupt;
use crate::report::{self, key};
use crate::terminal::table::Table;
use anyhow::ensure;
use hecaton_vm::guest_port::GuestMessage;
use holes::Holes;
use serde::Serialize;
use snapshot::{Snapshot, Sums};
use std::{
    fmt::Write as _,
    thread,
    time::{Duration, Instant},
};

/// How long the application may take to give back.
const READY: Duration = Duration::from_secs(60);

/// Bytes that the balloon leaves of the guest's initial memory. QEMU counts no virtio-mem memory
/// into the memory that a balloon can take.
const BALLOON_LEAVES: u64 = 256 << 20;

/// Results, one row for each application.
#[derive(Serialize)]
pub(super) struct Fragmentation {
    rows: Vec<Row>,
    /// Why there is not more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failure: Option<String>,
}

/// An application.
#[derive(Serialize)]
struct Row {
    load: Load,
    /// The application has all that it may have.
    full: Sums,
    /// It has given back what the host wants.
    given: Sums,
    /// The host has taken it.
    taken: Sums,
    /// Memory that the host got by the balloon, which was then deflated.
    balloon: Back,
    /// And by virtio-mem.
    virtio_mem: Back,
    #[serde(skip)]
    pictures: [String; 3],
}

/// Memory that the host got back.
#[derive(Clone, Copy, Serialize)]
struct Back {
    asked_bytes: u64,
    seconds: f64,
    #[serde(flatten)]
    holes: Holes,
}

pub(super) fn run(bench: &Bench<'_>) -> anyhow::Result<Fragmentation> {
    let mut fragmentation = Fragmentation { rows: Vec::new(), failure: None };
    for load in [Load::FullHuge, Load::FullSmall] {
        match measure(bench, load) {
            Ok(row) => fragmentation.rows.push(row),
            Err(error) => {
                interrupt::check()?;
                fragmentation.failure = Some(format!("{load}: {error:#}"));
                break;
            }
        }
    }
    Ok(fragmentation)
}

fn measure(bench: &Bench<'_>, load: Load) -> anyhow::Result<Row> {
    let sizes = bench.sizes;
    bench.say(&format!("fragmentation: {load}: a guest comes up"));
    let base = format!("memory-backend-memfd,id=base,share=on,size={}M", sizes.base >> 20);
    let own =
        ["-object", &base, "-machine", "memory-backend=base", "-device", "virtio-balloon-pci"];
    let name = format!("fragmentation-{}", load.name());
    let starting = Starting::with(bench.kit, &name, load.kernel(), sizes, bench.dir, &own)?;
    let mut guest = starting.wait_up()?;
    load.start(&mut guest)?;
    // Nothing is readied: that would take blocks out of the picture.
    guest.start_manager_as(ManagerInside {
        reserve: sizes.reserve,
        ahead: 0,
        hook: load.hook(),
        is_told: true,
    })?;
    load.wait_full(&mut guest, sizes.reserve)?;
    let full = look(&mut guest)?;

    let target = sizes.device - sizes.reclaim;
    let id = guest.announce(target)?;
    let begun = Instant::now();
    while !matches!(guest.hear()?, Some(GuestMessage::Ready { id: of, .. }) if of == id) {
        ensure!(begun.elapsed() < READY, "the application has not given back");
        interrupt::check()?;
        thread::sleep(TICK);
    }
    let given = look(&mut guest)?.within(&full);

    let asked_bytes = (sizes.reclaim / 2).min(sizes.base - BALLOON_LEAVES);
    let before = Holes::of(guest.qemu())?;
    let begun = Instant::now();
    guest.balloon(sizes.base - asked_bytes, bench.limit)?;
    let seconds = begun.elapsed().as_secs_f64();
    let balloon = Back { asked_bytes, seconds, holes: Holes::of(guest.qemu())?.since(before) };
    guest.balloon(sizes.base, bench.limit)?;

    let before = guest.device()?.plugged_bytes;
    let begun = Instant::now();
    guest.request(target)?;
    while guest.device()?.plugged_bytes > target && begun.elapsed() < bench.limit {
        interrupt::check()?;
        thread::sleep(TICK);
    }
    let seconds = begun.elapsed().as_secs_f64();
    // The device's blocks are whole huge pages.
    let bytes = before - guest.device()?.plugged_bytes;
    let holes = Holes { all_bytes: bytes, whole_bytes: bytes };
    let virtio_mem = Back { asked_bytes: sizes.reclaim, seconds, holes };
    let taken = look(&mut guest)?.within(&full);
    ensure!(!load.was_killed(&mut guest)?, "the guest's kernel has killed the application");
    let row = Row {
        load,
        full: full.sums(),
        given: given.sums(),
        taken: taken.sums(),
        balloon,
        virtio_mem,
        pictures: [full, given, taken].map(|snapshot| picture::draw(&snapshot.pages())),
    };
    bench.say(&format!(
        "fragmentation: {load}: {} MiB free, {} MiB in whole huge pages",
        row.given.free_bytes >> 20,
        row.given.free_in_huge_bytes >> 20
    ));
    Ok(row)
}

fn look(guest: &mut Guest<'_>) -> anyhow::Result<Snapshot> {
    let program = program_in_guest();
    let said = guest.shell(&format!("{program} bench program pages --pid $(cat /tmp/load.pid)"))?;
    Snapshot::of(&serde_json::from_str::<Vec<_>>(&said)?)
}

fn percent(part: u64, of: u64) -> String {
    format!("{:.0} %", 100.0 * part as f64 / of.max(1) as f64)
}

const HEAD: [&str; 7] =
    ["", "", ">application MiB", ">others", ">free", ">in whole 2 MiB", ">in whole 128 MiB"];

fn cells(row: &Row) -> [[String; 7]; 3] {
    let moments = [("full", row.full), ("given back", row.given), ("taken by the host", row.taken)];
    moments.map(|(moment, sums)| {
        let mib = |bytes: u64| (bytes >> 20).to_string();
        let part = |bytes: u64| format!("{} ({})", mib(bytes), percent(bytes, sums.free_bytes));
        [
            row.load.to_string(),
            moment.to_owned(),
            mib(sums.application_bytes),
            mib(sums.other_bytes),
            mib(sums.free_bytes),
            part(sums.free_in_huge_bytes),
            part(sums.free_in_blocks_bytes),
        ]
    })
}

const BACK_HEAD: [&str; 6] = ["", "", ">asked MiB", ">back", ">in whole 2 MiB", ">s"];

fn back_cells(row: &Row) -> [[String; 6]; 2] {
    [("balloon", row.balloon), ("virtio-mem", row.virtio_mem)].map(|(by, back)| {
        let Holes { all_bytes, whole_bytes } = back.holes;
        [
            row.load.to_string(),
            by.to_owned(),
            (back.asked_bytes >> 20).to_string(),
            (all_bytes >> 20).to_string(),
            format!("{} ({})", whole_bytes >> 20, percent(whole_bytes, all_bytes)),
            format!("{:.2}", back.seconds),
        ]
    })
}

pub(super) fn show(fragmentation: &Fragmentation) {
    println!("The guest's memory, in MiB: what is free in whole pieces");
    let mut table = Table::new(HEAD);
    fragmentation.rows.iter().flat_map(cells).for_each(|cells| table.row(cells));
    print!("{table}");
    println!("\nWhat the host has again");
    let mut table = Table::new(BACK_HEAD);
    fragmentation.rows.iter().flat_map(back_cells).for_each(|cells| table.row(cells));
    print!("{table}");
    if let Some(failure) = &fragmentation.failure {
        println!("  not all could be measured: {failure}");
    }
}

/// Figure 9.
pub(super) fn html(fragmentation: &Fragmentation, body: &mut String) {
    let keys: String =
        picture::COLOURS.iter().map(|(_, colour, name)| key(*colour, name)).collect();
    let _ = writeln!(
        body,
        "<h2>Whole huge pages</h2><p>Each point is a page of 4 KiB of a guest\u{2019}s memory, by who has it; a line is 2 MiB, and 512 lines are \
         1 GiB.{keys}</p>{}{}",
        report::table(HEAD, fragmentation.rows.iter().flat_map(cells)),
        report::table(BACK_HEAD, fragmentation.rows.iter().flat_map(back_cells)),
    );
    let moments = ["full", "given back", "taken by the host"];
    for row in &fragmentation.rows {
        let _ = write!(body, "<h3>The application: {}</h3><div class=\"pages\">", row.load);
        for (moment, picture) in moments.iter().zip(&row.pictures) {
            let _ = write!(body, "<figure><h3>{moment}</h3>{picture}</figure>");
        }
        let _ = writeln!(body, "</div>");
    }
}
