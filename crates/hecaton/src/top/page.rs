//! An overview as lines of text, as wide as the terminal is.
//!
//! Pure. Every part of a bar has a shade of its own, so that it is told from its neighbour without
//! colours, too.

use crate::terminal::table::Table;
use hecaton_manager::watching::overview::{
    ConsumerKind, ConsumerView, DonorView, HostView, Overview, Severity,
};
use hecaton_memory::Size;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use std::cmp::Ordering;
use std::fmt::Write as _;

/// Most alarms that are shown; the rest is counted.
const MAX_ALARMS: usize = 6;

/// Stands for an unknown number.
const UNKNOWN: &str = "-";

/// Look of the parts of a host's bar: shade, colour, name.
const PARTS: [(char, Color, &str); 6] = [
    ('▒', Color::DarkGray, "system"),
    ('▓', Color::Blue, "local"),
    ('█', Color::Green, "lent"),
    ('░', Color::Green, "free to lend"),
    ('·', Color::Reset, "free, kept"),
    ('╱', Color::Yellow, "borrowed"),
];

/// Order of consumers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Order {
    /// Faults a second, most first
    Faults,
    /// Memory in the pool, most first
    Use,
    /// Name
    Name,
}

/// All that is on the screen.
pub(super) struct Page {
    /// The manager's base URL.
    pub(super) manager: String,
    /// Last answer of the manager.
    pub(super) overview: Overview,
    /// Why the last request failed, if it did.
    pub(super) trouble: Option<String>,
    /// Order of the consumers.
    pub(super) order: Order,
    /// Whether there are colours.
    pub(super) colours: bool,
}

impl Page {
    /// The page, for a width in columns.
    pub(super) fn lines(&self, width: u16) -> Vec<Line<'static>> {
        let view = &self.overview;
        let mut lines = self.head();
        lines.push(Line::default());
        lines.extend(self.alarms());
        lines.push(Line::default());
        lines.extend(self.hosts(usize::from(width)));
        if !view.consumers.is_empty() {
            lines.push(Line::default());
            lines.extend(self.table(&self.consumers()));
        }
        if !view.donors.is_empty() {
            lines.push(Line::default());
            lines.extend(self.table(&donors(&view.donors)));
        }
        if view.left_out > 0 {
            lines.push(Line::raw(format!("and {} that are not listed", view.left_out)));
        }
        lines
    }

    /// The line of keys.
    pub(super) fn foot(&self) -> Line<'static> {
        let by = match self.order {
            Order::Faults => "faults",
            Order::Use => "use",
            Order::Name => "name",
        };
        let text = format!("q ends   sorted by {by}: f faults  u use  n name   ↑ ↓ move");
        Line::styled(text, self.style(Modifier::REVERSED, None))
    }

    fn head(&self) -> Vec<Line<'static>> {
        let (view, totals) = (&self.overview, &self.overview.totals);
        let up = duration(view.uptime_ms);
        let mut lines = vec![Line::from(vec![
            Span::styled("hecaton", self.bold()),
            Span::raw(format!("  {}  up {up}  ", self.manager)),
            Span::raw(format!("nodes {} of {}", totals.nodes_up, totals.nodes)),
        ])];
        lines.push(Line::raw(format!(
            "lent {} of {}   can be lent {}   held by consumers {}   faults/s {}",
            size(totals.lent_bytes),
            size(totals.lend_bytes),
            size(totals.lendable_bytes),
            size(totals.pool_bytes),
            rate(totals.faults_per_s),
        )));
        if let Some(policy) = &view.policy {
            lines.push(Line::raw(format!("policy {policy}")));
        }
        if let Some(trouble) = &self.trouble {
            let style = self.style(Modifier::BOLD, Some(Color::Red));
            lines.push(Line::styled(format!("as it was: {trouble}"), style));
        }
        lines
    }

    fn alarms(&self) -> Vec<Line<'static>> {
        let alarms = &self.overview.alarms;
        if alarms.is_empty() {
            return vec![Line::styled(
                "no alarms",
                self.style(Modifier::empty(), Some(Color::Green)),
            )];
        }
        let mut lines = Vec::new();
        for alarm in alarms.iter().take(MAX_ALARMS) {
            let (word, colour) = match alarm.severity {
                Severity::Critical => ("CRITICAL", Color::Red),
                Severity::Warning => ("WARNING ", Color::Yellow),
                Severity::Notice => ("notice  ", Color::Cyan),
            };
            let since = duration(self.overview.uptime_ms.saturating_sub(alarm.since_ms));
            lines.push(Line::from(vec![
                Span::styled(word, self.style(Modifier::BOLD, Some(colour))),
                Span::raw("  "),
                Span::styled(alarm.subject.clone(), self.bold()),
                Span::raw(format!("  {}  (for {since})", alarm.text)),
            ]));
        }
        if let Some(more @ 1..) = alarms.len().checked_sub(MAX_ALARMS) {
            lines.push(Line::raw(format!("and {more} more")));
        }
        lines
    }

    fn hosts(&self, width: usize) -> Vec<Line<'static>> {
        let hosts = &self.overview.hosts;
        if hosts.is_empty() {
            return vec![Line::raw("no node has joined yet")];
        }
        let mut key = vec![Span::styled("HOSTS", self.bold())];
        for (shade, colour, name) in PARTS {
            key.push(Span::raw("  "));
            key.push(Span::styled(shade.to_string(), self.style(Modifier::empty(), Some(colour))));
            key.push(Span::raw(format!(" {name}")));
        }
        let mut lines = vec![Line::from(key)];
        let name_width =
            hosts.iter().map(|host| host.name.chars().count()).max().unwrap_or(0).min(24);
        let figures: Vec<_> = hosts.iter().map(figures).collect();
        let figures_width = figures.iter().map(|text| text.chars().count()).max().unwrap_or(0);
        let bar_width = width.saturating_sub(name_width + figures_width + 4).max(8);
        let whole =
            |host: &HostView| host.memory_bytes.saturating_add(host.borrowed_bytes.unwrap_or(0));
        let scale = hosts.iter().map(whole).max().unwrap_or(0).max(1);
        for (host, figures) in hosts.iter().zip(figures) {
            let name: String = host.name.chars().take(name_width).collect();
            let style = if host.is_up { self.bold() } else { self.style(Modifier::DIM, None) };
            let mut spans = vec![Span::styled(format!("{name:name_width$}  "), style)];
            let mut used = 0;
            for ((shade, colour, _), cells) in PARTS.into_iter().zip(cells(host, scale, bar_width))
            {
                used += cells;
                let colour = if host.is_up { colour } else { Color::DarkGray };
                let bar = shade.to_string().repeat(cells);
                spans.push(Span::styled(bar, self.style(Modifier::empty(), Some(colour))));
            }
            let rest = bar_width.saturating_sub(used) + 2;
            spans.push(Span::raw(" ".repeat(rest)));
            spans.push(Span::raw(figures));
            lines.push(Line::from(spans));
        }
        lines
    }

    fn consumers(&self) -> Table {
        let mut list: Vec<&ConsumerView> = self.overview.consumers.iter().collect();
        let most = |a: Option<f64>, b: Option<f64>| {
            b.unwrap_or(-1.0).partial_cmp(&a.unwrap_or(-1.0)).unwrap_or(Ordering::Equal)
        };
        list.sort_by(|a, b| match self.order {
            Order::Faults => most(a.faults_per_s, b.faults_per_s).then_with(|| a.id.cmp(&b.id)),
            Order::Use => b.pool_bytes.cmp(&a.pool_bytes).then_with(|| a.id.cmp(&b.id)),
            Order::Name => a.name.cmp(&b.name).then_with(|| a.id.cmp(&b.id)),
        });
        // The most important columns come first: a narrow terminal shows no more.
        let mut table = Table::new([
            "CONSUMER",
            ">FAULTS/S",
            ">POOL",
            ">TARGET",
            ">LOCAL",
            ">LIMIT",
            ">P50 µs",
            ">P99 µs",
            ">COPIES",
            "KIND",
            "NODE",
            "STATE",
        ]);
        for one in list {
            let kind = match one.kind {
                ConsumerKind::Program => "program",
                ConsumerKind::Machine => "vm",
                ConsumerKind::Volume => "volume",
            };
            table.row([
                one.name.clone(),
                rate(one.faults_per_s),
                size(one.pool_bytes),
                size(one.target_bytes),
                size(one.local_bytes),
                size(one.local_limit_bytes),
                micros(one.p50_us),
                micros(one.p99_us),
                one.copies.map_or_else(|| UNKNOWN.to_owned(), |copies| copies.to_string()),
                kind.to_owned(),
                one.node.clone(),
                one.state.clone(),
            ]);
        }
        table
    }

    /// A table's lines, the heading in bold.
    fn table(&self, table: &Table) -> Vec<Line<'static>> {
        let text = table.to_string();
        let style = |at| if at == 0 { self.bold() } else { Style::default() };
        text.lines()
            .enumerate()
            .map(|(at, line)| Line::styled(line.to_owned(), style(at)))
            .collect()
    }

    fn bold(&self) -> Style {
        self.style(Modifier::BOLD, None)
    }

    fn style(&self, modifier: Modifier, colour: Option<Color>) -> Style {
        let style = Style::default().add_modifier(modifier);
        match colour {
            Some(colour) if self.colours => style.fg(colour),
            _ => style,
        }
    }
}

fn donors(donors: &[DonorView]) -> Table {
    let heading = ["DONOR", "NODE", "STATE", ">LENT", ">OF", ">CAN LEND", ">RESTARTS"];
    let mut table = Table::new(heading);
    for donor in donors {
        table.row([
            donor.name.clone(),
            donor.node.clone(),
            donor.state.clone(),
            size(donor.lent_bytes),
            Size(donor.lend_bytes).to_string(),
            size(donor.lendable_bytes),
            donor.restarts.to_string(),
        ]);
    }
    table
}

/// Figures of a host beside its bar.
fn figures(host: &HostView) -> String {
    if !host.is_up {
        return format!("silent for {}", duration(host.silent_ms));
    }
    let mut figures = format!(
        "{:>7}  lent {:>7}  borrowed {:>7}",
        Size(host.memory_bytes).to_string(),
        size(host.lent_bytes),
        size(host.borrowed_bytes),
    );
    if host.quota_bytes.is_some() {
        let (used, quota) = (size(host.quota_used_bytes), size(host.quota_bytes));
        let _ = write!(figures, "  uses {used:>7} of {quota:>7}");
    }
    match &host.membership {
        Some(membership) => format!("{membership}  {figures}"),
        None => figures,
    }
}

/// How many cells of a bar each part gets, in the order of [`PARTS`]. Unknown parts leave cells
/// open at the end of the host's memory.
fn cells(host: &HostView, scale: u64, width: usize) -> [usize; 6] {
    // By the ends of the parts rather than their lengths, so that roundings do not add up.
    let (mut end, mut at, mut cells) = (0u64, 0, [0; 6]);
    for (part, cells) in host.parts().into_iter().zip(&mut cells) {
        end = end.saturating_add(part.unwrap_or(0));
        let to = (end as f64 / scale as f64 * width as f64).round() as usize;
        *cells = to.min(width) - at;
        at += *cells;
    }
    cells
}

fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| UNKNOWN.to_owned(), |bytes| Size(bytes).to_string())
}

fn rate(per_s: Option<f64>) -> String {
    per_s.map_or_else(|| UNKNOWN.to_owned(), |rate| format!("{rate:.0}"))
}

fn micros(us: Option<f64>) -> String {
    us.map_or_else(|| UNKNOWN.to_owned(), |us| format!("{us:.1}"))
}

fn duration(ms: u64) -> String {
    crate::status::duration(ms / 1000)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use hecaton_manager::watching::overview::{Alarm, Totals};
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    pub(in super::super) fn page() -> Page {
        let host = |name: &str, borrowed| HostView {
            name: name.to_owned(),
            is_up: true,
            memory_bytes: 16 * GIB,
            system_bytes: Some(4 * GIB),
            local_bytes: Some(2 * GIB),
            lent_bytes: Some(2 * GIB),
            lendable_bytes: Some(4 * GIB),
            free_bytes: Some(4 * GIB),
            borrowed_bytes: borrowed,
            ..HostView::default()
        };
        let consumer = |name: &str, faults, pool| ConsumerView {
            id: format!("a/{name}"),
            name: name.to_owned(),
            node: "a".to_owned(),
            state: "running".to_owned(),
            faults_per_s: faults,
            pool_bytes: Some(pool * GIB),
            ..ConsumerView::default()
        };
        let donor = |name: &str| DonorView { name: name.to_owned(), ..DonorView::default() };
        let overview = Overview {
            uptime_ms: 60_000,
            totals: Totals {
                nodes_up: 2,
                nodes: 2,
                lend_bytes: Some(8 * GIB),
                ..Totals::default()
            },
            hosts: vec![host("a", Some(16 * GIB)), host("b", None)],
            consumers: vec![
                consumer("sort", Some(12.0), 1),
                consumer("redis", Some(340.0), 2),
                consumer("new", None, 3),
            ],
            donors: vec![donor("donor-1"), donor("donor-2")],
            alarms: vec![Alarm {
                severity: Severity::Critical,
                subject: "c".to_owned(),
                text: "node not heard from for 7 s".to_owned(),
                since_ms: 50_000,
            }],
            ..Overview::default()
        };
        Page {
            manager: "http://m".to_owned(),
            overview,
            trouble: None,
            order: Order::Faults,
            colours: true,
        }
    }

    fn text(page: &Page) -> Vec<String> {
        page.lines(100).iter().map(|line| line.to_string().trim_end().to_owned()).collect()
    }

    #[test]
    fn everything_is_on_the_page() {
        let lines = text(&page());
        assert_eq!(lines[0], "hecaton  http://m  up 1 min  nodes 2 of 2");
        assert!(lines[1].starts_with("lent - of 8G   can be lent -"), "{}", lines[1]);
        assert_eq!(lines[3], "CRITICAL  c  node not heard from for 7 s  (for 10 s)");
        let bar = |name: &str| {
            let line = lines.iter().find(|line| line.starts_with(name));
            line.unwrap_or_else(|| panic!("{lines:?}")).clone()
        };
        let (a, b) = (bar("a  "), bar("b  "));
        assert_eq!(a.matches('╱').count() * 2, a.matches(['╱', '▒', '▓', '█', '░', '·']).count());
        assert!(a.ends_with("16G  lent      2G  borrowed     16G"), "{a}");
        assert!(b.ends_with("borrowed       -") && !b.contains('╱'), "{b}");
    }

    #[test]
    fn the_policy_is_on_the_page_with_what_it_allows() {
        let mut page = page();
        assert!(!text(&page).iter().any(|line| line.starts_with("policy")));
        page.overview.policy = Some("tlp --p 2".to_owned());
        let host = &mut page.overview.hosts[0];
        (host.quota_bytes, host.quota_used_bytes) = (Some(8 * GIB), Some(3 * GIB));
        page.overview.consumers[0].target_bytes = Some(5 * GIB);
        let lines = text(&page);
        assert_eq!(lines[2], "policy tlp --p 2");
        let line = |start: &str| {
            let line = lines.iter().find(|line| line.starts_with(start));
            line.unwrap_or_else(|| panic!("{lines:?}")).clone()
        };
        assert!(line("a  ").ends_with("uses      3G of      8G"), "{}", line("a  "));
        assert!(!line("b  ").contains("uses"), "it was told no quota");
        let words = |line: String| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(line("CONSUMER"))[2..4], ["POOL", "TARGET"]);
        assert_eq!(words(line("sort"))[2..4], ["1G", "5G"]);
        assert_eq!(words(line("redis"))[2..4], ["2G", "-"]);
    }

    #[test]
    fn consumers_are_sorted_as_one_likes() {
        let mut page = page();
        let mut names = |order| {
            page.order = order;
            let lines = text(&page);
            let at = lines.iter().position(|line| line.starts_with("CONSUMER")).expect("a table");
            let name = |line: &String| line.split(' ').next().unwrap_or_default().to_owned();
            lines[at + 1..at + 4].iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(names(Order::Faults), ["redis", "sort", "new"]);
        assert_eq!(names(Order::Use), ["new", "redis", "sort"]);
        assert_eq!(names(Order::Name), ["new", "redis", "sort"]);
    }

    #[test]
    fn without_colours_there_are_none() {
        let mut page = page();
        let colours = |page: &Page| {
            let lines = page.lines(100);
            let spans = lines.iter().flat_map(|line| line.spans.iter().map(|one| one.style));
            let all = spans.chain(lines.iter().map(|line| line.style));
            all.filter(|style| style.fg.is_some() || style.bg.is_some()).count()
        };
        assert!(colours(&page) > 0);
        page.colours = false;
        assert_eq!(colours(&page), 0);
    }

    #[test]
    fn a_manager_that_says_nothing_is_told_of() {
        let mut page = page();
        page.trouble = Some("no manager answers".to_owned());
        assert!(text(&page).contains(&"as it was: no manager answers".to_owned()));
    }

    proptest! {
        /// A bar is never longer than there is room, and its own part as long as the host's memory
        /// is.
        #[test]
        fn bars_fit(
            parts in prop::collection::vec(0u64..1 << 40, 6),
            other in 0u64..1 << 42,
            width in 1usize..200,
        ) {
            let host = HostView {
                system_bytes: Some(parts[0]),
                local_bytes: Some(parts[1]),
                lent_bytes: Some(parts[2]),
                lendable_bytes: Some(parts[3]),
                free_bytes: Some(parts[4]),
                borrowed_bytes: Some(parts[5]),
                ..HostView::default()
            };
            let whole: u64 = parts.iter().sum();
            let scale = whole.max(other).max(1);
            let cells = cells(&host, scale, width);
            let exact = whole as f64 / scale as f64 * width as f64;
            prop_assert_eq!(cells.iter().sum::<usize>(), exact.round() as usize);
            for (part, cells) in parts.iter().zip(cells) {
                let exact = *part as f64 / scale as f64 * width as f64;
                prop_assert!((cells as f64 - exact).abs() <= 1.0);
            }
        }
    }
}
