//! Plots as SVG: bars, and lines over time. Colours are classes, so that the page's style decides.

use std::fmt::Write as _;

/// Colours that the page's style has (`c0` …).
pub(super) const COLOURS: usize = 4;

const LEFT: f64 = 52.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;

/// A bar, or several side by side.
pub(super) struct Group {
    pub(super) label: String,
    /// One for each colour.
    pub(super) values: Vec<f64>,
}

/// Values over a common step.
pub(super) struct Line {
    pub(super) colour: usize,
    pub(super) is_dashed: bool,
    pub(super) name: String,
    /// `None` leaves a gap.
    pub(super) values: Vec<Option<f64>>,
}

/// Groups of bars, with their values on hover. `unit` labels the axis.
pub(super) fn bars(groups: &[Group], unit: &str, width: f64, height: f64) -> String {
    let bottom = 104.0;
    let most = groups.iter().flat_map(|group| &group.values).copied().fold(0.0, f64::max);
    let frame = Frame::new(width, height, bottom, most);
    let mut svg = frame.open(unit);
    let slot = frame.plot_width() / groups.len().max(1) as f64;
    for (at, group) in groups.iter().enumerate() {
        let bar = slot * 0.8 / group.values.len().max(1) as f64;
        for (colour, &value) in group.values.iter().enumerate() {
            let x = LEFT + slot * (at as f64 + 0.1) + bar * colour as f64;
            let y = frame.y(value);
            let _ = write!(
                svg,
                "<rect class=\"c{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{bar:.1}\" height=\"{:.1}\">\
                 <title>{}: {value:.1} {unit}</title></rect>",
                colour % COLOURS,
                frame.y(0.0) - y,
                escape(&group.label),
            );
        }
        let (x, y) = (LEFT + slot * (at as f64 + 0.5), frame.y(0.0) + 12.0);
        let _ = write!(
            svg,
            "<text class=\"tick\" text-anchor=\"end\" transform=\"translate({x:.1} {y:.1}) \
             rotate(-35)\">{}</text>",
            escape(&group.label),
        );
    }
    svg + "</svg>"
}

/// Lines over seconds. `most` is the top of the axis, so that plots side by side have one scale.
pub(super) fn lines(lines: &[Line], unit: &str, most: f64, seconds: usize, width: f64) -> String {
    let frame = Frame::new(width, 210.0, 34.0, most);
    let mut svg = frame.open(unit);
    let x = |second: usize| LEFT + frame.plot_width() * second as f64 / seconds.max(1) as f64;
    for second in ticks(seconds as f64).into_iter().map(|tick| tick as usize) {
        let y = frame.y(0.0) + 15.0;
        let _ = write!(
            svg,
            "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{y:.1}\">{second} s</text>",
            x(second),
        );
    }
    for line in lines {
        let mut points = String::new();
        let mut is_open = false;
        for (second, value) in line.values.iter().enumerate() {
            if let Some(value) = value {
                let step = if is_open { 'L' } else { 'M' };
                let _ = write!(points, "{step}{:.1} {:.1}", x(second + 1), frame.y(*value));
            }
            is_open = value.is_some();
        }
        let _ = write!(
            svg,
            "<path class=\"l{}{}\" d=\"{points}\"><title>{}</title></path>",
            line.colour % COLOURS,
            if line.is_dashed { " dashed" } else { "" },
            escape(&line.name),
        );
    }
    svg + "</svg>"
}

/// Text as HTML and SVG have it.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The drawing area and its vertical axis.
struct Frame {
    width: f64,
    height: f64,
    bottom: f64,
    most: f64,
}

impl Frame {
    fn new(width: f64, height: f64, bottom: f64, most: f64) -> Frame {
        let most = if most > 0.0 { most * 1.05 } else { 1.0 };
        Frame { width, height, bottom, most }
    }

    fn plot_width(&self) -> f64 {
        self.width - LEFT - RIGHT
    }

    fn y(&self, value: f64) -> f64 {
        let plot = self.height - TOP - self.bottom;
        TOP + plot * (1.0 - (value / self.most).min(1.0))
    }

    fn open(&self, unit: &str) -> String {
        let (width, height) = (self.width, self.height);
        let mut svg = format!("<svg viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\">");
        for tick in ticks(self.most) {
            let y = self.y(tick);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{tick:.0}</text>",
                width - RIGHT,
                LEFT - 5.0,
                y + 4.0,
            );
        }
        let _ = write!(
            svg,
            "<text class=\"tick\" transform=\"translate(11 {:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{}</text>",
            TOP + (height - TOP - self.bottom) / 2.0,
            escape(unit),
        );
        svg
    }
}

/// Four to nine round values from 0 to `most`.
fn ticks(most: f64) -> Vec<f64> {
    let rough = most / 5.0;
    let power = 10f64.powf(rough.max(1e-9).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= rough);
    let step = step.unwrap_or(10.0) * power;
    (0..).map(|at| f64::from(at) * step).take_while(|tick| *tick <= most).take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(100.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(7.0), [0.0, 2.0, 4.0, 6.0]);
        for most in [0.3, 1.0, 9.9, 36.0, 1024.0, 99_999.0] {
            assert!((3..=9).contains(&ticks(most).len()), "{most}: {:?}", ticks(most));
        }
    }

    #[test]
    fn a_gap_starts_a_line_anew_and_names_are_escaped() {
        let values = vec![Some(1.0), Some(2.0), None, Some(3.0)];
        let line = Line { colour: 0, is_dashed: true, name: "a<b".into(), values };
        let svg = lines(&[line], "MiB", 4.0, 4, 300.0);
        assert_eq!(svg.matches('M').count() - "MiB".matches('M').count(), 2);
        assert!(svg.contains("a&lt;b") && svg.contains("l0 dashed"), "{svg}");
    }
}
