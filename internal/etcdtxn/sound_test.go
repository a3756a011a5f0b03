package etcdtxn

import "testing"

func TestSoundVersions(t *testing.T) {
	for version, good := range map[string]bool{
		"3.7.3": true, "3.7.1": true, "3.7.0": false, "3.6.14": true, "3.6.13": false,
		"3.5.33": false, "3.8.0-alpha.0": true, "4.0.0": true, "2.9.9": false, "x": false, "": false,
	} {
		if err := sound(version); (err == nil) != good {
			t.Errorf("%q: %v", version, err)
		}
	}
}
