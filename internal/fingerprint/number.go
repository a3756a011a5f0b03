package fingerprint

import (
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// doubleDigits is how many significant digits a double needs at most (IEEE 754,
// section 5.12.2): what has more is not meant to be one.
const doubleDigits = 17

// numberFault says why canonical JSON would make another number of a JSON
// number literal; empty if it keeps it. A number without a fractional part is
// kept if its canonical form is the same number; one with a fractional part is
// a double by nature and kept unless it overflows, underflows to zero, or has more
// digits than any double needs.
func numberFault(literal string) string {
	double, err := strconv.ParseFloat(literal, 64)
	if err != nil {
		return literal + " is too large for a double"
	}
	given := parseDecimal(literal)
	if given.digits == "" {
		return ""
	}
	if double == 0 {
		return literal + " is too small for a double"
	}
	if given.exponent < 0 {
		if len(given.digits) > doubleDigits {
			return literal + " has more digits than a double keeps; send it as a string"
		}
		return ""
	}
	canonical := jsontext.Value(literal)
	if err := canonical.Canonicalize(); err != nil {
		return literal + " cannot be written canonically"
	}
	if parseDecimal(string(canonical)) != given {
		return literal + " would become " + string(canonical) + "; send it as a string"
	}
	return ""
}

// decimal is the number digits × 10^exponent; digits neither begins nor ends
// with zero, and is empty for zero. Two numbers are equal if these are.
type decimal struct {
	negative bool
	digits   string
	exponent int
}

// parseDecimal reads a JSON number literal whose double is finite and, unless
// all its digits are zero, not zero: so its exponent is in reach of an int.
func parseDecimal(literal string) decimal {
	var d decimal
	literal, d.negative = strings.CutPrefix(literal, "-")
	mantissa, exponent := literal, ""
	if i := strings.IndexAny(literal, "eE"); i >= 0 {
		mantissa, exponent = literal[:i], literal[i+1:]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimLeft(whole+fraction, "0")
	d.digits = strings.TrimRight(digits, "0")
	if d.digits == "" {
		return decimal{}
	}
	if exponent != "" {
		d.exponent, _ = strconv.Atoi(exponent)
	}
	d.exponent += len(digits) - len(d.digits) - len(fraction)
	return d
}
